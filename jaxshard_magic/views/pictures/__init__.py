"""The pictures of what is shown, each as an SVG document of its own that needs no page around it."""
