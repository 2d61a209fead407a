"""Formats of token ids that other programs wrote: files read in place, checked, and written."""
