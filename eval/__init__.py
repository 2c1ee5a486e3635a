"""What a conversion cost and saved: quality, memory and speed of checkpoints, side by side."""
