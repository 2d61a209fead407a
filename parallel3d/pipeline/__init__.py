"""The pipeline: schedules as data, and what draws, times and runs them."""
