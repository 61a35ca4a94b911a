"""Facts about a compiled step: array placement, device memory, communication and predicted time."""
