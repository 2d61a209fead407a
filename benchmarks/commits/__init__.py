"""Two commits side by side: does the later one do the same, and as fast? See `__main__.py`."""
