"""Check the machines of a launch before a run, and name the rank or host that differs."""
