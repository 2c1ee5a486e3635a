"""Models whose class cannot have fewer key/value heads, written for a class that can."""
