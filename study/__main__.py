"""`python -m gqa.study`."""

from gqa.study.cli import main

if __name__ == "__main__":
    main()
