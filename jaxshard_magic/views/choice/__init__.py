"""Result of an automatic search as text, as HTML without script, and as a widget."""
