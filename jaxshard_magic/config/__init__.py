"""Options, strategies and meshes: everything that is asked of a step, checked once and handed on as a `Request`."""
