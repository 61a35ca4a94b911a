"""Experts, positions and the turns of a ring, drawn and in words."""
