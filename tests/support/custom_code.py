"""The classes of transformers that our custom code extends, by name."""

from support.tiny_configs import SOURCES

THEIRS = {tiny.name: tiny for tiny in SOURCES}
