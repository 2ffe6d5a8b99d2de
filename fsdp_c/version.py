"""The version of this package (which pyproject.toml has, too)."""

__version__ = "0.1.0"
