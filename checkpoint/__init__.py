"""Checkpoints on a disk or a hub: headers, shards, config.json, side files, records."""
