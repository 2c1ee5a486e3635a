"""Continued training of a converted checkpoint: a fraction alpha of the data, optionally taught by
the source.
"""
