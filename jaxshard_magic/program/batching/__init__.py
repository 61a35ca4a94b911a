"""Which dimensions are the batch, how values follow it, and a step run on microbatches or on added rows: README.md."""
