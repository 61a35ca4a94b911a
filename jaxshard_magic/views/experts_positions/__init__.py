"""Experts, positions and ring attention as drawings and text."""
