"""`python -m gqa.uptrain`, and so every launcher: accelerate launch -m gqa.uptrain, torchrun -m
gqa.uptrain.
"""

from gqa.uptrain.cli import main

if __name__ == "__main__":
    main()
