"""Steps as pipelines: split into stages without being run, and run beside the plain step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxshard_magic
from jaxshard_magic.config.request import make_request
from jaxshard_magic.gradients.accumulate import Accumulated
from jaxshard_magic.gradients.captures import needs
from jaxshard_magic.gradients.rewrite import in_microbatches
from jaxshard_magic.pipeline.around import flat, gradient_calls
from jaxshard_magic.pipeline.loss import Wish
from jaxshard_magic.pipeline.split import Split
from jaxshard_magic.program.batching.batch import Batch
from jaxshard_magic.program.peel import peel
from jaxshard_magic.program.roles import Roles
from jaxshard_magic.program.trace import Traced
from jaxshard_magic.program.unwrap import strip
from jaxshard_magic.report import Check
from jaxshard_magic.schedule import make
from jaxshard_magic.step.tracing import capture, trace_call
from jaxshard_magic.strategies import understand

Made = tuple[Callable[..., Any], Sequence[Any]]  # a step, and the arguments of one call


@dataclass(frozen=True)
class Captured:
    """A step with its gradient calls over microbatches, and what its inputs are."""

    traced: Traced
    calls: Sequence[Accumulated]
    batch: Batch
    roles: Roles

    def split(self, stages: int, schedule: str = "1f1b", chunks: int | None = None) -> Split:
        n, m = len(self.calls), self.calls[0].cut.microbatches
        actions = make(schedule, stages=stages, microbatches=m, chunks=chunks).for_losses(n)
        state = [(i, o) for o, i in self.roles.state.items()]
        step = flat(self.traced.closed)
        return Split(step, self.calls, actions, state, list(self.batch.dims), [Wish()] * n)


def captured(made: Made, microbatches: int) -> Captured:
    """A step as a pipeline of so many microbatches sees it."""
    step, args = made
    peeled, mesh = peel(strip(step), tuple(args), {}), jax.make_mesh((1,), ("data",))
    request = make_request("dp", mesh, microbatches=microbatches)
    traced = trace_call(peeled, request)
    assert traced.captured is not None
    facts = understand(traced.traced, request)
    gradient_calls(flat(traced.captured.closed))  # refuses those in loops
    wanted = needs(traced.captured, facts, request.gradients, 1, pipeline=True)
    rewritten = in_microbatches(facts, capture(peeled, traced, wanted), request.gradients)
    return Captured(traced.captured, list(rewritten.calls.values()), facts.batch, facts.roles)


def checked(
    made: Made, stages: int, microbatches: int, schedule: str = "1f1b", chunks: int | None = None
) -> Check:
    """One call of a step as a pipeline beside the plain step; where its loss couples examples, beside a loop over its
    microbatches written by hand."""
    step, args = made
    how = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    piped = jaxshard_magic.shard(step, "pp", mesh=f"pipe={stages}", check=True, **how)
    piped(*args)
    assert piped.checked is not None
    return piped.checked
