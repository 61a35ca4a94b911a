"""A step in stages has the plain step's numbers, whatever it is made of and whatever the schedule."""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import pipelined_images as images
from support import pipelined_steps as steps
from support.pipelined_models import KINDS, Batch, Step
from support.pipelines import checked

import jaxshard_magic
from jaxshard_magic.report import Check
from jaxshard_magic.schedule import NAMES


def optimised(optimizer, **options):
    return lambda: steps.optimised(optimizer, **options)


STEPS = {
    "mlp": steps.mlp,
    "transformer": steps.unrolled,
    "scanned transformer": steps.scanned,
    "seven layers": lambda: steps.scanned(7),
    "three layers": lambda: steps.scanned(3),
    "tied embeddings, clipped": steps.tied,
    "tied embeddings, scanned": lambda: steps.tied(stacked=True),
    "every second step": optimised(optax.MultiSteps(optax.adamw(1e-2), 2)),
    "if finite": optimised(optax.apply_if_finite(optax.adamw(1e-2), 3)),
    "lamb": optimised(optax.lamb(1e-2)),
    "adafactor": optimised(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "adafactor, unrolled": optimised(optax.adafactor(1e-2, min_dim_size_to_factor=8), stacked=False),
    "muon": optimised(optax.contrib.muon(1e-2), stacked=False),
    "schedule": optimised(optax.adamw(steps.schedule())),
    "averages of parameters": steps.averaged,
    "frozen": steps.frozen,
    "stopped gradient": steps.stopped,
    "adapters": steps.adapters,
    "penalty on weights": steps.penalty,
    "masked mean": steps.masked_mean,
    "sum": steps.total,
    "metrics": steps.metrics,
    "dropout": steps.dropout,
    "encoder and decoder": steps.encoder_decoder,
    "own derivative": steps.own_derivative,
    "remat": lambda: steps.remat(stacked=False),
    "remat in a scan": lambda: steps.remat(stacked=True),
    "branches": steps.branches,
    "loops": steps.loops,
    "experts and keys": steps.routed,
    "parameter that nothing reads": steps.unread,
    "average of layers": steps.average_of_layers,
    "batch norm": images.batch_norm,
    "nnx batch norm and dropout": images.nnx_batch_norm,
}
QUICK = {  # of schedules with a stage a rank, several, and both directions
    ("tied embeddings, scanned", "zb-h1", 2): (),
    ("scanned transformer", "interleaved", 2): (),
    ("metrics", "dualpipev", 2): pytest.mark.ci,
}
FITTING = {
    "1f1b": (2, 3, 4),
    "gpipe": (4,),
    "zb-h1": (3,),
    "interleaved": (2,),
    "zb-v": (2,),
    "dualpipev": (2,),
}
EACH = [(schedule, n) for schedule, stages in FITTING.items() for n in stages]
ROWS = set(QUICK) | {  # every step in some row
    (name, *EACH[i % len(EACH)])
    for i, name in enumerate(name for name in STEPS if name not in {quick for quick, *_ in QUICK})
}


def difference(found: Check) -> float:
    assert found.passed and found.max_abs_diff is not None, found
    return found.max_abs_diff


@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    [pytest.param(*row, marks=QUICK.get(row, pytest.mark.full)) for row in sorted(ROWS)],
)
def test_a_step_in_stages_has_the_plain_steps_numbers(name, schedule, stages):
    chunks = 2 if schedule == "interleaved" else None
    assert difference(checked(STEPS[name](), stages, 4, schedule, chunks)) < 1e-5


@pytest.mark.full
def test_products_in_bfloat16_differ_by_their_rounding():
    assert difference(checked(steps.half(), 2, 4)) < 1e-4


INSIDE = {  # the strategy, the mesh of each stage, and over how many devices the examples are divided
    "-": ("pp", "", 1),
    "dp": ("pp", " data=2", 2),
    "fsdp": ("pp+fsdp", " data=2", 2),
    "tp": ("pp+tp", " model=2", 1),
}
STAGES = (2, 3, 4, 5, 6, 8)
# Any two columns hold every pair of their values that there can be in some row. A star: always run.
TABLE = """
    kind        schedule     stages  inside
    mlp         gpipe        3       -
    mlp         1f1b         2       tp
    mlp         interleaved  2       fsdp
    mlp         looped-bfs   2       -
    mlp         zb-h1        2       fsdp
    mlp         zb-h2        4       dp
    mlp         zero-bubble  2       tp
    mlp         zb-v         2       dp
    mlp         v-half       2       dp
    mlp         v-min        2       fsdp
    mlp         dualpipev    2       fsdp
    unrolled    gpipe        2       dp
    unrolled    1f1b         4       -
    unrolled    interleaved  5       -
    unrolled    interleaved  6       -
    unrolled    interleaved  8       -
    unrolled    looped-bfs   2       tp
    unrolled    looped-bfs   5       -
    unrolled    zb-h1        3       dp
    unrolled    zb-h2        2       fsdp
    unrolled    zero-bubble  8       -
    unrolled    zb-v         6       -
    unrolled    zb-v         8       -
    unrolled    v-half       5       -
    unrolled    v-min        4       tp
    unrolled    dualpipev    4       dp
    unrolled    dualpipev    6       -
    scanned     gpipe        2       fsdp
    scanned     1f1b         6       -
    scanned     interleaved  3       dp
    scanned     looped-bfs   4       dp
    scanned     zb-h1        4       tp
    scanned     zb-h2        8       -
    scanned     zero-bubble  5       -
    scanned     zb-v         4       dp
    scanned     v-half       4       dp
    scanned     v-min        6       -
    scanned     dualpipev    5       -
    tied        gpipe        5       -
    tied        1f1b         2       dp     *
    tied        interleaved  4       tp
    tied        looped-bfs   6       -
    tied        looped-bfs   8       -
    tied        zb-h1        8       -
    tied        zb-h2        3       tp
    tied        zero-bubble  4       fsdp
    tied        zb-v         3       fsdp
    tied        zb-v         5       -
    tied        v-half       3       fsdp
    tied        v-half       6       -
    tied        v-half       8       -
    tied        v-min        5       -
    tied        v-min        8       -
    tied        dualpipev    8       -
    batch-norm  gpipe        4       tp
    batch-norm  gpipe        6       -
    batch-norm  gpipe        8       -
    batch-norm  1f1b         3       fsdp
    batch-norm  1f1b         5       -
    batch-norm  1f1b         8       -
    batch-norm  interleaved  2       -
    batch-norm  looped-bfs   3       fsdp
    batch-norm  zb-h1        5       -
    batch-norm  zb-h1        6       -
    batch-norm  zb-h2        5       -
    batch-norm  zb-h2        6       -
    batch-norm  zero-bubble  3       dp
    batch-norm  zero-bubble  6       -
    batch-norm  zb-v         2       tp
    batch-norm  v-half       2       tp
    batch-norm  v-min        3       dp
    batch-norm  dualpipev    3       tp
"""
CLOSE = 2e-4  # of how far a leaf moved


class Row(NamedTuple):
    kind: str
    schedule: str
    stages: int
    inside: str

    @property
    def chunks(self) -> int:
        return NAMES[self.schedule].chunks or 2

    @property
    def microbatches(self) -> int:
        """Twice the stages where there are few, or where the schedule needs as many."""
        return self.stages * (2 if self.stages < 4 or self.schedule == "dualpipev" else 1)

    @property
    def can_be(self) -> bool:
        """With layers enough, and 8 devices enough."""
        devices = self.stages * (1 if self.inside == "-" else 2)
        return self.stages * self.chunks <= KINDS[self.kind].most and devices <= 8


def read(table: str) -> dict[Row, bool]:
    words = [line.split() for line in table.strip().splitlines()[1:]]
    return {Row(kind, schedule, int(n), inside): bool(star) for kind, schedule, n, inside, *star in words}


TRAINED = read(TABLE)


def five_steps(step: Step, state: Iterable[Any], batches: Iterable[Batch]) -> tuple[list, list]:
    """The state after a step on each batch, and their losses."""
    losses = []
    for batch in batches:
        *state, loss = step(*state, *batch)
        losses.append(loss)
    return list(state), losses


def farthest(got: Any, want: Any, start: Any) -> float:
    """The largest difference of a number, relative to the largest move of one in its leaf."""
    leaves = zip(*(map(numbers, jax.tree.leaves(x)) for x in (got, want, start)), strict=True)
    return max(np.max(np.abs(a - b)) / (np.max(np.abs(b - before)) or 1.0) for a, b, before in leaves)


def numbers(x: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x, np.float64)


@pytest.mark.ci
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if always else pytest.mark.full, id=" ".join(map(str, row)))
        for row, always in TRAINED.items()
    ],
)
def test_five_steps_of_training_are_those_of_the_plain_step(row):
    kind, (strategy, mesh, shards) = KINDS[row.kind], INSIDE[row.inside]
    parts = row.stages * row.chunks
    step, state = kind.make(parts)
    batches = [kind.batch(seed, 2 * row.microbatches) for seed in range(5)]
    piped = jaxshard_magic.shard(
        step,
        strategy,
        mesh=f"pipe={row.stages}{mesh}",
        schedule=row.schedule,
        microbatches=row.microbatches,
        chunks=row.chunks,
    )
    plain = step if kind.by_hand is None else kind.by_hand(parts, row.microbatches, shards)
    got, losses = five_steps(piped, state, batches)
    want, expected = five_steps(jax.jit(plain), state, batches)
    assert farthest(got, want, state) < CLOSE
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if row.inside in ("fsdp", "tp"):
        assert mesh.split("=")[0].strip() in {axis for x in jax.tree.leaves(got) for axis in x.sharding.spec}


def test_every_pair_that_can_be_is_in_some_row():
    possible = [r for r in itertools.starmap(Row, itertools.product(KINDS, NAMES, STAGES, INSIDE)) if r.can_be]
    for one, other in itertools.combinations(Row._fields, 2):

        def pairs(rows, one=one, other=other):
            return {(getattr(row, one), getattr(row, other)) for row in rows}

        assert pairs(TRAINED) == pairs(possible)
