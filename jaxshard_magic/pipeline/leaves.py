"""The step's own arrays as the ranks have them: handed out before a step, put together after it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..program.ir import Value
from .homes import Homes


class Leaf:
    """An input of the step: `sharding` says where it lies. `readers`: the ranks that have it, or a piece each."""

    def __init__(self, i: int, homes: Homes, wants: Sequence[set[Value]]):
        part, program = homes.split.leaves[i], homes.split.around.program
        at = homes.split.placed.at
        self.values = part.values
        first = self.values[0]
        self.readers = (
            [at[v] for v in self.values]
            if first in at
            else [r for r, wanted in enumerate(wants) if first in wanted]
        )
        self.sharding = homes.leaf(i, self.readers)
        pieces = self.values if len(self.values) > 1 else self.values * len(self.readers)
        self._targets = [
            (program.shapes[v], homes.sharding(v, r)) for v, r in zip(pieces, self.readers, strict=True)
        ]
        self._cuts = None
        if len(self.values) > 1 and not homes.even(part):
            sizes = [program.shapes[v][0] for v in self.values]
            self._cuts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]

    @property
    def put_together(self) -> bool:
        """Do its ranks have copies of uneven pieces, while the array lies on the first of them?"""
        return self._cuts is not None

    def hand_out(self, x: Any, here: Sequence[dict[Value, Any]]) -> None:
        """Put the array, or its pieces, where each of its ranks looks for it; `x` may be numpy's, or lie elsewhere."""
        if self._cuts is not None:
            cuts = zip(self._cuts, self._cuts[1:], strict=False)
            parts = [jax.device_put(x[a:b], at) for (a, b), (_, at) in zip(cuts, self._targets, strict=True)]
        else:
            parts = self._parts(x) if self._targets else []
        values = self.values if len(self.values) > 1 else self.values * len(parts)
        for v, rank, part in zip(values, self.readers, parts, strict=True):
            here[rank][v] = part

    def _parts(self, x: Any) -> list[Any]:
        if getattr(x, "sharding", None) != self.sharding:
            x = jax.device_put(x, self.sharding)
        if len(self._targets) == 1:
            return [x]
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        return [_of_shards(shape, at, shards) for shape, at in self._targets]


def _of_shards(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[Any, Any]) -> jax.Array:
    mine = [shards[d] for d in np.asarray(sharding.mesh.devices).flat]
    return jax.make_array_from_single_device_arrays(shape, sharding, mine)


class Output:
    """An output of the step."""

    def __init__(self, o: int, homes: Homes):
        part, program = homes.split.outputs[o], homes.split.around.program
        self.values = part.values
        self.sharding = homes.output(o)
        self._even = len(part.values) > 1 and homes.even(part)
        self._shape: tuple[int, ...] = ()
        if len(part.values) > 1:
            shapes = [program.shapes[v] for v in part.values]
            self._shape = (sum(s[0] for s in shapes), *shapes[0][1:])
            self._joined = jax.jit(partial(jnp.concatenate, axis=0), out_shardings=self.sharding)

    def put_together(self, made: Mapping[Value, Any]) -> Any:
        """The array, from the values that the ranks have made."""
        parts = [made[v] for v in self.values]
        if len(parts) == 1:
            return parts[0]
        if not self._even:
            return self._joined([jax.device_put(x, self.sharding) for x in parts])
        shards = [shard.data for x in parts for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(self._shape, self.sharding, shards)
