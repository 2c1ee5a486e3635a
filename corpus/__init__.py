"""Text for training, calibration and evaluation."""
