"""Options, strategies and meshes, checked once and combined in a `Request`."""
