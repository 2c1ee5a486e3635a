"""Rewrite a Hugging Face checkpoint with fewer (or more) key/value heads."""
