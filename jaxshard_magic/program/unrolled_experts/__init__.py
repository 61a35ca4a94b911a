"""Experts that a step runs one after the other, in a Python loop or a loop over their index, rewritten as a batch.

The rewrite is applied to the captured step, before gradients are taken. `array_parts` finds slices of a weight,
`expert_groups` equations that do the same for each expert, `detection` both of these and loops over the index in a
program; `batch_unrolled_experts` emits the batched step.
"""
