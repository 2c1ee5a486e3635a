"""Every architecture, as data: one entry each, in the file of its kind."""
