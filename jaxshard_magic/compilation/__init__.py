"""One call of a step, traced, planned and compiled: the result is a `CompiledStep`.

`analysis` reads a `CompiledStep`; `ShardedStep` in `step` keeps one for each kind of call, and stands above both.
"""
