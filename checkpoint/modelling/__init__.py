"""Classes with grouped-query attention for models of transformers that have none, one file for each model type.

A file is written beside the weights of its type, so it imports torch and transformers only and nothing of this package.
"""
