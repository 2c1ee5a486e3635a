"""Models in memory: loaded strictly by transformers, their names of tensors, their custom code."""
