"""What tests share: tiny models, checkpoints, processes, texts, a stand-in for the hub."""
