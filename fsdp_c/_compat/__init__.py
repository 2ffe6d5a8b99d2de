"""Compatibility with torch: changes to torch's objects, and their undo."""
