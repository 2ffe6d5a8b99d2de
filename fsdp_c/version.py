"""The version of this package. pyproject.toml has a copy."""

__version__ = "0.1.0"
