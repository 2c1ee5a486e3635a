"""What a conversion cost and saved. Not there yet: the next issues fill it."""
