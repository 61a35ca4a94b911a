"""Steps as pipelines: split into stages without being run, and run beside the plain step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxshard_magic
from jaxshard_magic.compilation.tracing import capture_at_sizes, trace_call
from jaxshard_magic.config.request import make_request
from jaxshard_magic.gradients.accumulate import AccumulatedGradient
from jaxshard_magic.gradients.captures import needed_captures
from jaxshard_magic.gradients.rewrite import in_microbatches
from jaxshard_magic.pipeline.outer_program import flatten_step, gradient_calls
from jaxshard_magic.pipeline.split_loss import SplitOptions
from jaxshard_magic.pipeline.split_step import SplitStep
from jaxshard_magic.program.batching.batch import Batch
from jaxshard_magic.program.flatten_call import flatten_call
from jaxshard_magic.program.roles import InputRoles
from jaxshard_magic.program.trace import Traced
from jaxshard_magic.program.unwrap import unwrap_step
from jaxshard_magic.report import Check
from jaxshard_magic.schedule import make
from jaxshard_magic.strategies import find_facts

Made = tuple[Callable[..., Any], Sequence[Any]]  # a step, and the arguments of one call


@dataclass(frozen=True)
class Captured:
    """A step with its gradient calls over microbatches, and what its inputs are."""

    traced: Traced
    calls: Sequence[AccumulatedGradient]
    batch: Batch
    roles: InputRoles

    def split(self, stages: int, schedule: str = "1f1b", chunks: int | None = None) -> SplitStep:
        n, m = len(self.calls), self.calls[0].cut.microbatches
        actions = make(schedule, stages=stages, microbatches=m, chunks=chunks).for_losses(n)
        state = [(i, o) for o, i in self.roles.state.items()]
        step = flatten_step(self.traced.closed)
        return SplitStep(step, self.calls, actions, state, list(self.batch.input_dims), [SplitOptions()] * n)


def captured(made: Made, microbatches: int) -> Captured:
    """A step as a pipeline of so many microbatches sees it."""
    step, args = made
    peeled, mesh = flatten_call(unwrap_step(step), tuple(args), {}), jax.make_mesh((1,), ("data",))
    request = make_request("dp", mesh, microbatches=microbatches)
    traced = trace_call(peeled, request)
    assert traced.captured is not None
    facts = find_facts(traced.traced, request)
    gradient_calls(flatten_step(traced.captured.closed))  # refuses those in loops
    wanted = needed_captures(traced.captured, facts, request.gradients, 1, pipeline=True)
    rewritten = in_microbatches(facts, capture_at_sizes(peeled, traced, wanted), request.gradients)
    return Captured(traced.captured, list(rewritten.calls.values()), facts.batch, facts.roles)


def checked(made: Made, stages: int, microbatches: int, schedule: str = "1f1b", chunks: int | None = None) -> Check:
    """One call of a step as a pipeline beside the plain step; where its loss couples examples, beside a loop over its
    microbatches written by hand."""
    step, args = made
    how = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    piped = jaxshard_magic.shard(step, "pp", mesh=f"pipe={stages}", check=True, **how)
    piped(*args)
    assert piped.checked is not None
    return piped.checked
