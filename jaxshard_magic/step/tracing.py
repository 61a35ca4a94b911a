"""One call of a step traced: as it is, with its gradient calls seen, or as one of the mesh's devices has it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..errors import ShardError, one_of
from ..gradients.options import Inside
from ..program.capture import capturing
from ..program.mapped import Mapped, bound, no_mesh
from ..program.peel import Peeled, Result
from ..program.trace import Traced, Vjp, trace
from ..program.untraceable import Explained

if TYPE_CHECKING:
    from ..gradients.rewriting import Rewriting

Spread = Callable[..., Mapped]  # (call, mesh, specs, rules) of a step that is written for one device


def traced_call(
    peeled: Peeled,
    avals: Sequence[jax.ShapeDtypeStruct],
    inside: Inside,
    spread: Spread | None,
    mesh: Mesh,
    given: Mapping[str, PartitionSpec],
    rules: Sequence[tuple[str, PartitionSpec]],
) -> "tuple[Traced, Result, Rewriting | None]":
    """The traced step, how its result is put together, and how its gradient calls are to be rewritten.

    Raises `ShardError` for a step that jax can't trace, and for options that it has no place for.
    """
    if spread is not None or peeled.step.pmap is not None:
        return *_per_device(peeled, avals, spread, inside, mesh, given, rules), None
    if not inside.rewrites:
        return *_traced(peeled, avals), None
    from ..gradients.rewriting import Rewriting

    opaque, result = _traced(peeled, avals, capturing)
    rewriting = Rewriting(opaque, lambda other: _traced(peeled, other, capturing)[0], inside)
    return rewriting.plain, result, rewriting


def _traced(
    peeled: Peeled,
    avals: Sequence[jax.ShapeDtypeStruct],
    seen: Callable[[Vjp], Vjp] | None = None,
    names: Mapping[Any, int] | None = None,
) -> tuple[Traced, Result]:
    results = []

    def fun(*leaves: Any) -> tuple[list[Any], list[Any]]:
        outs, paths, result = peeled.fun(*leaves)
        results.append(result)
        return outs, paths

    with Explained(peeled.step.name):
        traced = trace(bound(fun, names or {}), avals, [path for path, _, _ in peeled.inputs], seen)
    return traced, results[-1]


def _per_device(peeled, avals, spread, inside, mesh, given, rules) -> tuple[Traced, Result]:
    """The step as one of the mesh's devices has it."""
    name = peeled.step.name
    if spread is None:
        raise ShardError(
            f"{name} is decorated with jax.pmap, so that it is written for one device: use %%shard pmap, or take "
            "jax.pmap and its collectives out",
            fix="%%shard pmap",
        )
    if inside.asked:
        options = one_of(f"--{option}" for option in inside.asked)
        raise ShardError(
            f"pmap runs the gradients of {name} as they are written; leave {options} out, or use dp"
        )
    mapped = spread(peeled, mesh, given, rules)
    with no_mesh():
        traced, result = _traced(peeled, mapped.parts(avals), names=mapped.sizes)
    return mapped.traced(traced, result), result
