"""Scaling laws: ladders of runs, fits with intervals, forecasts and reports."""
