"""Flat inputs and outputs of a step: distribute to ranks before the step, assemble after the step."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..program.ir import Value
from .shardings import StepShardings


class StepInput:
    """An input of the step.

    Args:
        i: Position of the input.
        homes: Shardings of the step.
        values_read: For each rank, the outer values read.

    Attributes:
        values: Outer values of the input, one per piece.
        reader_ranks: Ranks with a copy, or with a piece each.
        sharding: Sharding of the array between steps.
    """

    def __init__(self, i: int, homes: StepShardings, values_read: Sequence[set[Value]]):
        pieces_of_value, program = homes.split.leaves[i], homes.split.outer.program
        rank_of_value = homes.split.assignment.rank_of_value
        self.values = pieces_of_value.values
        first = self.values[0]
        self.reader_ranks = (
            [rank_of_value[v] for v in self.values]
            if first in rank_of_value
            else [r for r, wanted in enumerate(values_read) if first in wanted]
        )
        self.sharding = homes.input_sharding(i, self.reader_ranks)
        pieces = self.values if len(self.values) > 1 else self.values * len(self.reader_ranks)
        self._targets = [
            (program.shapes[v], homes.sharding(v, r)) for v, r in zip(pieces, self.reader_ranks, strict=True)
        ]
        self._bounds = None
        if len(self.values) > 1 and not homes.has_even_pieces(pieces_of_value):
            sizes = [program.shapes[v][0] for v in self.values]
            self._bounds = [sum(sizes[:k]) for k in range(len(sizes) + 1)]

    @property
    def has_uneven_pieces(self) -> bool:
        """True if the ranks have copies of uneven pieces, while the array itself is on the first of these ranks."""
        return self._bounds is not None

    def distribute(self, x: Any, values_by_rank: Sequence[dict[Value, Any]]) -> None:
        """Put the array or its pieces into the initial values of each rank.

        Args:
            x: A jax array with any sharding, or a numpy array.
            values_by_rank: The initial values of each rank, extended in place.
        """
        if self._bounds is not None:
            # Uneven pieces can't be the shards of one array: each is sliced and copied.
            cuts = zip(self._bounds, self._bounds[1:], strict=False)
            parts = [jax.device_put(x[a:b], at) for (a, b), (_, at) in zip(cuts, self._targets, strict=True)]
        else:
            parts = self._rank_arrays(x) if self._targets else []
        values = self.values if len(self.values) > 1 else self.values * len(parts)
        for v, rank, part in zip(values, self.reader_ranks, parts, strict=True):
            values_by_rank[rank][v] = part

    def _rank_arrays(self, x: Any) -> list[Any]:
        if getattr(x, "sharding", None) != self.sharding:
            x = jax.device_put(x, self.sharding)
        if len(self._targets) == 1:
            return [x]
        # The shards are already on the ranks' devices: nothing is copied.
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        return [_array_of_shards(shape, at, shards) for shape, at in self._targets]


def _array_of_shards(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[Any, Any]) -> jax.Array:
    mine = [shards[d] for d in np.asarray(sharding.mesh.devices).flat]
    return jax.make_array_from_single_device_arrays(shape, sharding, mine)


class StepOutput:
    """An output of the step.

    Args:
        o: Position of the output.
        homes: Shardings of the step.

    Attributes:
        values: Outer values of the output, one per piece.
        sharding: Sharding of the assembled array.
    """

    def __init__(self, o: int, homes: StepShardings):
        part, program = homes.split.outputs[o], homes.split.outer.program
        self.values = part.values
        self.sharding = homes.output_sharding(o)
        self._even = len(part.values) > 1 and homes.has_even_pieces(part)
        self._shape: tuple[int, ...] = ()
        if len(part.values) > 1:
            shapes = [program.shapes[v] for v in part.values]
            self._shape = (sum(s[0] for s in shapes), *shapes[0][1:])
            self._concatenate = jax.jit(partial(jnp.concatenate, axis=0), out_shardings=self.sharding)

    def assemble(self, computed: Mapping[Value, Any]) -> Any:
        """Return the array, from the values computed on all ranks."""
        parts = [computed[v] for v in self.values]
        if len(parts) == 1:
            return parts[0]
        if not self._even:
            return self._concatenate([jax.device_put(x, self.sharding) for x in parts])
        shards = [shard.data for x in parts for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._shape, self.sharding, shards)
