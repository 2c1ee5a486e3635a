"""`python -m gqa.eval`, for launchers: accelerate launch -m gqa.eval, torchrun -m gqa.eval."""

from gqa.eval.cli import main

if __name__ == "__main__":
    main()
