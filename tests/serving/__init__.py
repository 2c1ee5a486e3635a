"""Serving engines as clients of converted checkpoints: `make test-serving`. pytest collects nothing
here.
"""
