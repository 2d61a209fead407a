"""A ladder: training runs of several sizes and budgets, for a scaling law, planned from one file.

A rung is one run of the ladder together with its cost and state.
"""
