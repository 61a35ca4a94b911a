"""Batch detection, labels for values that follow the batch, microbatches and padding: see README.md."""
