"""Ten optimizer steps with accumulation, remat, precision and strategies combined end at the plain step's numbers."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from support.ten_steps import BF16, F32, FP16, KINDS, MICROBATCHES, Kind, Numbers, by_hand, plain, trained

import jaxshard_magic

MESHES = {  # on eight devices, and over how many of them the examples are divided
    "dp": ("data=8", 8),
    "fsdp": ("data=8", 8),
    "tp": ("data=2 model=4", 2),
    "fsdp+tp": ("data=2 fsdp=2 model=2", 4),
    "sp": ("data=2 seq=4", 2),
}
# Two columns hold every pair of their values in some row; sp is for the kind that has positions. A star: always run.
TABLE = """
    kind             reduce         remat  type  strategy
    nnx-cnn          -              full   bf16  fsdp+tp
    nnx-cnn          each           regex  f32   tp
    nnx-cnn          once           -      bf16  fsdp
    nnx-cnn          once-gathered  2      f32   dp
    nnx-transformer  -              -      bf16  fsdp+tp
    nnx-transformer  each           2      f32   tp
    nnx-transformer  once           full   f32   fsdp
    nnx-transformer  once-gathered  regex  bf16  dp
    nnx-transformer  -              regex  f32   sp
    nnx-transformer  each           full   bf16  sp
    nnx-transformer  once           -      f32   sp
    nnx-transformer  once-gathered  2      bf16  sp
    linen            -              2      bf16  fsdp
    linen            each           -      f32   dp
    linen            once           regex  bf16  fsdp+tp
    linen            once-gathered  full   f32   tp
    pytree           -              regex  f32   dp
    pytree           each           full   bf16  fsdp
    pytree           once           2      f32   tp
    pytree           once-gathered  -      bf16  fsdp+tp
    equinox          -              full   bf16  dp
    equinox          each           regex  f32   fsdp
    equinox          once           -      bf16  tp
    equinox          once-gathered  2      f32   fsdp+tp   *
    clip-schedule    -              full   bf16  tp
    clip-schedule    each           regex  f32   fsdp+tp
    clip-schedule    once           -      bf16  dp
    clip-schedule    once-gathered  2      f32   fsdp
    clip-schedule    once           regex  fp16  fsdp      *
    multi-steps      -              full   bf16  dp
    multi-steps      each           regex  f32   fsdp
    multi-steps      once           -      bf16  tp
    multi-steps      once-gathered  2      f32   fsdp+tp
"""
NARROW = {"bf16": BF16, "fp16": FP16}
CLOSE = 5e-4  # of how far a leaf moved: rounding, which Adam makes more of where a gradient is nearly nothing


class Row(NamedTuple):
    kind: str
    reduce: str
    remat: str
    type: str
    strategy: str

    @property
    def options(self) -> dict[str, Any]:
        """What the row asks of `jaxshard_magic.shard`."""
        asked = {}
        if self.reduce != "-":
            asked |= {"microbatches": MICROBATCHES, "reduce": self.reduce}
        if self.remat != "-":
            asked["remat"] = KINDS[self.kind].block if self.remat == "regex" else self.remat
        if self.type != "f32":
            asked["precision"] = self.type
        return asked


ROWS = {Row(*line.split()[:5]): line.endswith("*") for line in TABLE.strip().splitlines()[1:]}


def off(kind: Kind, got: Numbers, want: Numbers, spared: float = 0.0) -> dict[str, float]:
    """How far each leaf is from `want` after the last step, relative to how far it moved since the first.

    The largest difference of one number; with `spared`, the root of all squares but for that share of them, two at
    least, that lie farthest.
    """
    found = {}
    for name in want[-1]:
        if any(name.removeprefix("result.").startswith(n) or f".{n}" in name for n in kind.step.noise):
            continue  # only rounding moves it, in the plain step too
        last, end, start = (x[name].astype(np.float64).ravel() for x in (got[-1], want[-1], want[0]))
        far = np.sort(np.abs(last - end))
        moved = np.abs(end - start)
        if spared and far.size > 2:
            far = far[: -max(2, int(spared * far.size))]
            found[name] = float(np.linalg.norm(far) / (np.linalg.norm(moved) or 1.0))
        else:
            found[name] = float(far.max() / (moved.max() or 1.0))
    return found


def farthest(leaves: dict[str, float]) -> tuple[float, str]:
    return max((far, name) for name, far in leaves.items())


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=() if always else pytest.mark.full, id=" ".join(r)) for r, always in ROWS.items()],
)
def test_ten_steps_are_those_of_the_plain_step(row):
    kind, (mesh, shards) = KINDS[row.kind], MESHES[row.strategy]
    sharded = jaxshard_magic.shard(kind.step.make().fn, row.strategy, mesh=mesh, **row.options)
    got = trained(kind, sharded)
    looped = shards if kind.looped and row.reduce != "-" else None
    want = plain(kind) if looped is None else by_hand(kind, F32, looped)
    if row.type == "f32":
        assert farthest(off(kind, got, want)) < (CLOSE, "")
    else:
        assert_as_near_as_by_hand(kind, got, want, by_hand(kind, NARROW[row.type], looped), row.type)


def assert_as_near_as_by_hand(kind: Kind, got: Numbers, want: Numbers, hand: Numbers, type: str) -> None:
    """In a narrower type no leaf is farther from float32 than twice what the farthest is with the casts by hand.

    Two numbers in a hundred are spared: Adam's first step is the sign of a gradient, and a sign that rounding turns
    moves that number a whole step. The casts by hand are right where they are a few roundings off.
    """
    rounding = float(jnp.finfo(NARROW[type]).eps) / 2
    (theirs, worst), ours = farthest(off(kind, hand, want, spared=0.02)), off(kind, got, want, spared=0.02)
    assert theirs < 16 * rounding, worst
    assert farthest(ours) < (2 * theirs, "")


def test_every_pair_of_options_is_in_some_row():
    tried = [row for row in ROWS if row.strategy != "sp" and row.type != "fp16"]
    for one, other in itertools.combinations(Row._fields, 2):
        pairs = {(getattr(row, one), getattr(row, other)) for row in tried}
        assert pairs == set(itertools.product(*map(set, zip(*pairs, strict=True)))), (one, other)
    positions = [row for row in ROWS if row.kind == "nnx-transformer" and row.strategy == "sp"]
    for column in ("reduce", "remat", "type"):
        values = {getattr(row, column) for row in tried}
        assert {getattr(row, column) for row in positions} == values, column


def test_a_learning_rate_that_is_off_by_a_thousandth_would_be_seen():
    kind = KINDS["pytree"]
    step = kind.step.make().fn

    def wrong(params, batch):
        moved, loss = step(params, batch)
        return {k: {n: p + 1.001 * (moved[k][n] - p) for n, p in v.items()} for k, v in params.items()}, loss

    assert farthest(off(kind, trained(kind, wrong), plain(kind))) > (CLOSE, "")
