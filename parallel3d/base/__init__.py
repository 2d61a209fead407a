"""What every room may use: errors, files, locks, terminal (no torch, no config)."""
