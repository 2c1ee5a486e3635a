"""gqa-ablate: compare conversions over methods, groups and amounts of training."""
