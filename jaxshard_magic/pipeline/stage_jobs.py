"""The programs of a stage as jobs: each picks its microbatch out of the whole batch, and adds to sums of gradients."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients.accumulate import summed_in
from ..program.ir import Value
from ..strategies.hold import Hold
from ..strategies.layout import Layout, partition_spec
from .homes import Homes, spec_of
from .jobs import Job, shape_of
from .programs import End, Runner, Share, StageProgram

_HASHED = 2**20  # bytes of a constant that is told by its numbers; a larger one is told by which array it is
_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
_NAMES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


class Functions:
    """What the programs of alike stages run, `run[kind]`: `(number of the microbatch, parameters, others, rest)`, with
    the sums of gradients before them where it adds to these. `first`: the first of these stages, after which a profiler
    names the programs."""

    def __init__(self, program: StageProgram, layout: Layout | None, first: int):
        self.runner = runner = Runner(program, layout)
        run = {kind: _of_microbatch(program, runner, program.share(kind)) for kind in _NAMES}
        given_back = len(program.moving_ins)
        self.run = {**run, "B": _adding(run["B"], given_back), "W": _adding(run["W"], 0)}
        for kind, run in self.run.items():
            run.__name__ = run.__qualname__ = f"stage{first}_{_NAMES[kind]}"


def _of_microbatch(program: StageProgram, runner: Runner, share: Share) -> Callable[..., list]:
    examples = set(program.examples)

    def run(m: Any, parameters: list, others: list, rest: list) -> list:
        mine = [
            lax.dynamic_index_in_dim(x, m, 0, keepdims=False) if k in examples else x
            for k, x in enumerate(others)
        ]
        return runner(share, [*parameters, *mine, *rest])

    return run


def _adding(own: Callable[..., list], first: int) -> Callable[..., tuple[list, list]]:
    def run(sums: list, m: Any, parameters: list, others: list, rest: list) -> tuple[list, list]:
        made = own(m, parameters, others, rest)
        return made[:first], [a + x.astype(a.dtype) for a, x in zip(sums, made[first:], strict=True)]

    return run


class StageJobs:
    """Where the arrays of stage `number` lie on its rank, and its programs as jobs.

    `stacked`: what it takes of the batch, all microbatches together, and where that lies. `sums`, `sums_at`: in what it
    adds up the gradient of each parameter; in `parts`, one for each shard of the examples, where devices store the
    parameter whole: they are summed over devices once a step. `alike`: the functions of stages before this one, which
    it shares with those like it.
    """

    def __init__(
        self,
        number: int,
        program: StageProgram,
        rank: int,
        homes: Homes,
        microbatches: int,
        alike: dict[Hashable, Functions],
        layout: Layout | None,
    ):
        self.program, self._rank, self._homes, self._layout = program, rank, homes, layout
        self._functions = _alike(alike, program, layout, number)
        whole, s = program.whole, program.slots
        inputs = whole.inputs
        self.parameters = [self.sharding(v) for v in inputs[: s.parameters]]
        stacked = set(program.examples)
        self.others = [
            self._at(PartitionSpec(None, *spec_of(layout, v))) if k in stacked else self.sharding(v)
            for k, v in enumerate(inputs[s.parameters : s.parameters + s.others])
        ]
        self.ins = [self.sharding(v) for v in inputs[s.parameters + s.others : s.given]]
        self.cotangents = [self.sharding(v) for v in inputs[s.given :]]
        self.given_back = list(map(self._of_end, program.given_back))
        self.made = list(map(self._of_end, program.made))
        avals = list(map(shape_of, program.avals))
        self.parts = [self._functions.runner.parts_spec(k) for k in range(s.parameters)]
        self.sums = [self._sum_of(k, a) for k, a in enumerate(avals[: s.parameters])]
        self.sums_at = [
            at if spec is None else self._at(partition_spec(spec))
            for at, spec in zip(self.parameters, self.parts, strict=True)
        ]
        others = [
            jax.ShapeDtypeStruct((microbatches, *a.shape), a.dtype) if k in stacked else a
            for k, a in enumerate(avals[s.parameters : s.parameters + s.others])
        ]
        self.stacked = [(a, self.others[k]) for k, a in enumerate(others) if k in stacked]
        self._args = _NUMBER, avals[: s.parameters], others
        self._ins = self._at(), self.parameters, self.others

    @property
    def hold(self) -> Hold | None:
        """What holds the program of the stage, or of the first one that is alike, to its layout; None where a rank is
        one device."""
        return self._functions.runner.hold

    def _sum_of(self, k: int, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """In what the gradients of parameter k are added up."""
        parts = self.parts[k]
        first = () if parts is None or self._layout is None else (self._layout.count(parts[0]),)
        return jax.ShapeDtypeStruct((*first, *aval.shape), summed_in(aval.dtype))

    def summed(self, k: int, x: Any) -> Any:
        """The gradient of parameter k, from what its gradients were added up in."""
        return x if self.parts[k] is None else self._functions.runner.summed(k, x)

    def _at(self, spec: PartitionSpec | None = None) -> NamedSharding:
        return self._homes.at(self._rank, spec)

    def sharding(self, v: Value) -> NamedSharding:
        """Of a value of the stage's program."""
        return self._at(spec_of(self._layout, v))

    def _of_end(self, end: End) -> NamedSharding:
        return self.sharding(end) if isinstance(end, Value) else self._at()

    def job(self, kind: str) -> Job:
        """The program of actions of a kind: F, B, I or W."""
        program, s = self.program, self.program.slots
        inputs = program.whole.inputs
        behind = [*inputs[s.given :], *program.kept]
        rest = {
            "F": inputs[s.parameters + s.others : s.given],
            "B": behind,
            "I": behind,
            "W": [*behind, *program.kept_for_weights],
        }[kind]
        outs = {
            "F": [*self.made, *map(self.sharding, program.kept)],
            "B": (self.given_back, self.sums_at),
            "I": [*self.given_back, *map(self.sharding, program.kept_for_weights)],
            "W": ([], self.sums_at),
        }[kind]
        avals = *self._args, [shape_of(program.whole.avals[v]) for v in rest]
        ins = *self._ins, list(map(self.sharding, rest))
        if kind in "BW":
            return Job(self._functions.run[kind], (self.sums, *avals), (self.sums_at, *ins), outs, (0,))
        return Job(self._functions.run[kind], avals, ins, outs)


def _alike(
    known: dict[Hashable, Functions], program: StageProgram, layout: Layout | None, number: int
) -> Functions:
    """Those of the first stage that is the same program, laid out the same: they are traced once."""
    key = _key(program, layout)
    if key not in known:
        known[key] = Functions(program, layout, number)
    return known[key]


def _key(program: StageProgram, layout: Layout | None) -> Hashable:
    whole = program.whole
    specs = tuple(spec_of(layout, v) for v in whole.inputs)
    ends = program.slots, len(program.made), tuple(program.moving_ins), tuple(program.examples)
    constants = tuple(map(_constant, whole.closed.consts))
    return str(whole.closed.jaxpr), constants, specs, ends, program.halved


def _constant(x: Any) -> Hashable:
    if getattr(x, "nbytes", _HASHED) >= _HASHED or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return id(x)
    return x.shape, x.dtype, hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
