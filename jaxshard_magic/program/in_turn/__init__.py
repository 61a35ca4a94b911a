"""Experts that a step goes through one after the other, in a Python loop or by their index, put side by side."""
