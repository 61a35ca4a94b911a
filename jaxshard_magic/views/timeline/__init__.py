"""How a pipeline in time is shown: as text, as HTML without script, and as a widget."""
