"""`python -m gqa.convert`, and so every launcher: torchrun -m gqa.convert, accelerate launch -m gqa.convert."""

from gqa.convert.cli import main

if __name__ == "__main__":
    main()
