"""Time breakdown of a recorded step as text, as HTML without script, and in a widget."""
