"""gqa-ablate: conversions compared over methods, groups and training."""
