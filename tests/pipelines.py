"""Steps as pipelines: split into stages without being run, and run beside the plain step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxshard_magic
from jaxshard_magic.gradients.accumulate import Accumulated
from jaxshard_magic.gradients.options import Inside
from jaxshard_magic.pipeline.around import flat, gradient_call
from jaxshard_magic.pipeline.split import Split
from jaxshard_magic.program.batch import Batch, find_batch
from jaxshard_magic.program.dimensions import Dimensions
from jaxshard_magic.program.flow import Flow
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.peel import peel, specs
from jaxshard_magic.program.roles import Roles, find_roles
from jaxshard_magic.program.trace import Traced
from jaxshard_magic.program.unwrap import strip
from jaxshard_magic.report import Check
from jaxshard_magic.schedule import make
from jaxshard_magic.step.tracing import traced_call

Made = tuple[Callable[..., Any], Sequence[Any]]  # a step, and the arguments of one call


@dataclass(frozen=True)
class Captured:
    """A step with its gradient call over microbatches, and what its inputs are."""

    traced: Traced
    call: Accumulated
    batch: Batch
    roles: Roles

    def split(self, stages: int, schedule: str = "1f1b", chunks: int | None = None) -> Split:
        actions = make(schedule, stages=stages, microbatches=self.call.cut.microbatches, chunks=chunks)
        state = [(i, o) for o, i in self.roles.state.items()]
        return Split(flat(self.traced.closed), self.call, actions, state, list(self.batch.dims))


def captured(made: Made, microbatches: int) -> Captured:
    """A step as a pipeline of so many microbatches sees it."""
    step, args = made
    peeled, mesh = peel(strip(step), tuple(args), {}), jax.make_mesh((1,), ("data",))
    traced, _, rewriting = traced_call(peeled, specs(peeled.leaves), Inside(microbatches), None, mesh, {}, ())
    assert rewriting is not None
    program = Program(traced.closed)
    roles = find_roles(traced, Flow(program))
    batch = find_batch(Dimensions(program, (1,)), roles)
    gradient_call(flat(rewriting.captured.closed))  # refuses all but one
    (call,) = rewriting.accumulated(batch, roles, 1).values()
    return Captured(rewriting.captured, call, batch, roles)


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
