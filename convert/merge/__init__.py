"""Heads brought into one basis before they are merged: from weights, or layer by layer from text."""
