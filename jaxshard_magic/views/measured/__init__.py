"""Where the time of a recorded step went, as text, as HTML without script, and in a widget."""
