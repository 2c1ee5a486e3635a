"""Further training of a converted checkpoint: by default its base model writes the text and
teaches it.
"""
