"""Text that a model writes itself, to calibrate, train and evaluate on."""
