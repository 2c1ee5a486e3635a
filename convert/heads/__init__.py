"""How every architecture stores and counts its heads."""
