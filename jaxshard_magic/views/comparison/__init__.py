"""Comparison of strategies as text, as HTML without script, and as a widget."""
