"""Continued training of a converted checkpoint. Not there yet: the next issues fill it."""
