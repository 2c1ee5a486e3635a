"""`python -m gqa`."""

from .cli import main

main()
