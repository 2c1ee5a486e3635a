"""Classes with grouped-query attention for models of transformers that have none.

The file of a model lies beside its weights, so it imports torch and transformers only.
"""
