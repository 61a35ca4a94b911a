"""Timeline of a pipeline as text, as HTML without script, and as a widget."""
