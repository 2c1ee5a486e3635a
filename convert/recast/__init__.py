"""Rewrite models whose class cannot have fewer key/value heads for a class that can."""
