"""Render a `Report` as text, HTML, drawings, a widget and figures, without importing jax."""
