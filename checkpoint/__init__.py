"""What lies on a disk or a hub: headers, shards, names, weights, tokenizers, and the classes that
read them.
"""
