"""`python -m gqa.convert`."""

from gqa.convert.cli import main

if __name__ == "__main__":
    main()
