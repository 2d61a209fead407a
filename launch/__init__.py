"""The commands, one file each: `python launch/NAME.py`, or `parallel3d NAME` if installed."""
