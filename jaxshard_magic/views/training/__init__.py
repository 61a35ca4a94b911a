"""Metrics of a run: while it trains, in its report, and several runs over each other."""
