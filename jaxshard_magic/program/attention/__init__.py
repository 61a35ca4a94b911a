"""Attention in a loss: recognition of hand-written softmax attention (`detection`) and one fused primitive
(`fused_attention`).

Stages of recognition, from the result backwards: `softmax` finds the exponentials and their sum, `score_path` the
equations between softmax and the query-key product, and reads them as a scale, masks (`masks`) and other changes of
scores, `dimension_roles` assigns batch, groups, positions and widths. Where nothing matches, `detection` names the
operation that prevents it. `blockwise` has the arithmetic of a block of queries and keys, used over all keys at once or
as a ring.
"""
