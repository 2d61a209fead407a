"""Pipeline schedules as data: one list of actions that is drawn, checked, timed and run."""
