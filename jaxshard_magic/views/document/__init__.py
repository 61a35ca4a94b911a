"""Documents: what a view says as data (`parts`), and its forms as text, Markdown and HTML."""
