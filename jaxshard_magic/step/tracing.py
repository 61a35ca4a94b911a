"""One call of a step traced: as it is, with its gradient calls seen, or as one of the mesh's devices has it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..errors import ShardError
from ..gradients.options import Inside
from ..program.capture import capturing
from ..program.mapped import Mapped, on_a_device
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
    name = peeled.step.name
    if spread is None and peeled.step.pmap is not None:
        raise ShardError(
            f"{name} is decorated with jax.pmap, so that it is written for one device: use %%shard pmap, or take "
            "jax.pmap and its collectives out",
            fix="%%shard pmap",
        )
    if spread is None:
        return _seen(peeled, avals, inside)
    _has_place(name, inside)
    mapped = spread(peeled, mesh, given, rules)
    traced, result, rewriting = _seen(peeled, mapped.parts(avals), inside, mapped)
    return mapped.traced(traced, result), result, rewriting


def _seen(
    peeled: Peeled, avals: Sequence[jax.ShapeDtypeStruct], inside: Inside, mapped: Mapped | None = None
) -> "tuple[Traced, Result, Rewriting | None]":
    """The step, on one device's parts where it is `mapped`."""
    if not inside.rewrites:
        return *_traced(peeled, avals, mapped), None
    from ..gradients.rewriting import Rewriting

    opaque, result = _traced(peeled, avals, mapped, capturing)
    rewriting = Rewriting(opaque, lambda other: _traced(peeled, other, mapped, capturing)[0], inside, mapped)
    return rewriting.plain, result, rewriting


def _traced(
    peeled: Peeled,
    avals: Sequence[jax.ShapeDtypeStruct],
    mapped: Mapped | None,
    seen: Callable[[Vjp], Vjp] | None = None,
) -> tuple[Traced, Result]:
    results = []

    def fun(*leaves: Any) -> tuple[list[Any], list[Any]]:
        outs, paths, result = peeled.fun(*leaves)
        results.append(result)
        return outs, paths

    with Explained(peeled.step.name), on_a_device(mapped):
        traced = trace(fun, avals, [path for path, _, _ in peeled.inputs], seen)
    return traced, results[-1]


def _has_place(name: str, inside: Inside) -> None:
    """Refuse the options that a step written for one device leaves no choice in."""
    asked = [f"--{k.replace('_', '-')} {v}" for k, v in inside.asked.items() if k.startswith("reduce")]
    if asked:
        raise ShardError(
            f"{' '.join(asked)}: under pmap gradients are reduced where {name} has its pmean, once a step, and in "
            "their own type; leave it out"
        )
    if inside.pad:
        raise ShardError(
            f"--pad: under pmap {name} is run on each device's part as it is written, and would count rows that are "
            "added; use a batch that divides, or dp"
        )
