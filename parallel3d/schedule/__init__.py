"""Pipeline schedules as data: drawn, checked, timed and run from one list."""
