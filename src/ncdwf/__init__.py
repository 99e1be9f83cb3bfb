"""Novel class discovery without forgetting."""

__version__ = "0.1.0"
