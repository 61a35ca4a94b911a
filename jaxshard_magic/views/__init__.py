"""A `Report` as text, HTML and drawings; nothing here imports jax."""
