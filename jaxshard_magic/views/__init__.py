"""A `Report` as text, HTML, drawings, a widget and figures; nothing here imports jax."""
