"""The methods of merging heads: one object in one file each, listed in table.py."""
