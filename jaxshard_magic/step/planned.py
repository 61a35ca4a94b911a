"""One call of a step traced and planned: all that is known of it before anything is compiled."""

import time
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..gradients.options import Inside
from ..plan import Plan
from ..program.peel import Peeled, Result, specs
from ..program.trace import Traced
from .donation import to_donate
from .tracing import Spread, traced_call

if TYPE_CHECKING:
    from ..gradients.rewriting import Rewriting

Planner = Callable[..., Plan]
Traces = MutableMapping[Hashable, tuple[Traced, Result]]  # of calls as they are, by their keys


@dataclass(frozen=True)
class Planned:
    """`avals`: the flat inputs, with rows that are added to the batch; `donated`: those whose memory outputs take
    over; `trace_s`: seconds."""

    traced: Traced
    result: Result
    rewriting: "Rewriting | None"
    plan: Plan
    avals: Sequence[jax.ShapeDtypeStruct]
    donated: tuple[int, ...]
    trace_s: float


def planned(
    peeled: Peeled,
    strategy: str,
    mesh: Mesh,
    *,
    planner: Planner,
    given: Mapping[str, PartitionSpec],
    rules: Sequence[tuple[str, PartitionSpec]],
    donate: bool | None,
    inside: Inside,
    spread: Spread | None = None,
    say: Callable[[str], None] = lambda _: None,
    traces: Traces | None = None,
) -> Planned:
    """Trace one kind of call of a step, and plan it. `traces`: of the same step before; what is traced is put there.

    Raises `ShardError` for a step that jax can't trace and whatever the planner raises; an exception of the user's own
    code passes through.
    """
    say("tracing")
    start = time.perf_counter()
    avals = specs(peeled.leaves)
    plain = spread is None and not inside.rewrites
    known = traces if traces is not None and plain else {}
    with own_mesh(mesh):
        if peeled.key in known:
            (traced, result), rewriting = known[peeled.key], None
        else:
            traced, result, rewriting = traced_call(peeled, avals, inside, spread, mesh, given, rules)
            known[peeled.key] = traced, result
        trace_s = time.perf_counter() - start
        metadata = [None] * len(traced.consts) + [noted for _, noted, _ in peeled.inputs]
        say(f"planning {strategy}")
        asked = {"specs": given, "rules": rules, "metadata": tuple(metadata)}
        asked |= {"reduce": inside.reduce, "sum_dtype": inside.sum_dtype}
        plan = planner(traced, mesh, strategy, **asked, rewrite=rewriting)
    if rewriting is not None:
        rewriting.forget()
        plan = replace(plan, findings=(*plan.findings, *rewriting.findings))
        traced = plan.traced or traced
        avals = _grown(avals, rewriting.added)
    return Planned(traced, result, rewriting, plan, avals, to_donate(peeled, traced, plan, donate), trace_s)


def own_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
    """Another mesh that the user has set would be taken for the step's."""
    current = jax.sharding.get_mesh()
    return nullcontext() if current.empty or current == mesh else jax.set_mesh(mesh)


def _grown(
    avals: Sequence[jax.ShapeDtypeStruct], added: Mapping[int, tuple[int, int]]
) -> list[jax.ShapeDtypeStruct]:
    """The shapes of inputs with rows added to them."""
    found = list(avals)
    for i, (dim, more) in added.items():
        shape = list(found[i].shape)
        shape[dim] += more
        found[i] = found[i].update(shape=tuple(shape))
    return found
