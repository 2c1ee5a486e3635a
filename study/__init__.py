"""gqa-ablate: compare conversions over methods, groups and amounts of training.

A *study* is a directory. A *cell* is one combination of method, number of KV heads and share of the
data; cells that differ only in that share have one *conversion* in common. A *row* is what was
measured of a cell, or why it failed: a line of results.jsonl. A *run* is one call of gqa-ablate,
which measures the cells that have no row yet.
"""
