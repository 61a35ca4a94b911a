"""Identify a step by its parameters, to recognize a later run of the same step."""

from dataclasses import dataclass
from typing import Any

from ..compilation.compiled_step import CompiledStep
from ..program.roles import OPTIMIZER, PARAMS


@dataclass(frozen=True)
class StepSignature:
    """Signature of a step.

    Attributes:
        state: Path, shape and dtype of each parameter and optimizer array.
        examples: Batch size; None without a batch.
    """

    state: frozenset[tuple[str, tuple[int, ...], Any]]
    examples: int | None

    def batch_size_of(self, later: CompiledStep) -> int | None:
        """Return the batch size if `later` runs the same step, with a model of the same parameters; else None."""
        return self.examples if self.state and self.state == step_signature(later).state else None


def step_signature(entry: CompiledStep) -> StepSignature:
    """Return the signature of a program's calls."""
    state = ((x.path, x.shape, x.dtype) for x in entry.plan.leaves if x.role in (PARAMS, OPTIMIZER))
    return StepSignature(frozenset(state), entry.examples)
