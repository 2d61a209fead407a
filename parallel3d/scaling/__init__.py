"""Scaling laws: tables of runs, fits with intervals, forecasts, and their report."""
