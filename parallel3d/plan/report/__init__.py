"""Output of the planner: tables, drawings, JSON, and choices written into a config."""
