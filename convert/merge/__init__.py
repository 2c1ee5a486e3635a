"""Align heads before merging them: from the weights alone, or layer by layer on text."""
