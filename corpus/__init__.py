"""Text for training, calibration and evaluation; imports nothing else of this project."""
