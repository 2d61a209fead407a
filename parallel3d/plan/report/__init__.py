"""What the planner prints, draws and writes into a config."""
