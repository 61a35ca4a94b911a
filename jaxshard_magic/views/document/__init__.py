"""Documents: what a view says, built once, and its forms as text, Markdown and HTML."""
