"""How a comparison of strategies is shown: as text, as HTML without script, and as a widget."""
