"""Output of the planner: tables, drawings, JSON, and configs with its choices."""
