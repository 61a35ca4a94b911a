"""Rewriting of a step's gradient calls: microbatches, remat, precision, loss scaling, padding."""
