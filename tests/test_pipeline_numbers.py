"""A step in stages has the plain step's numbers, whatever it is made of and whatever the schedule."""

import optax
import pipelined_images as images
import pipelined_steps as steps
import pytest
from pipelines import checked


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
QUICK = {  # a row or two of each schedule
    ("mlp", "1f1b", 2),
    ("tied embeddings, clipped", "zb-h1", 2),
    ("scanned transformer", "interleaved", 2),
    ("three layers", "gpipe", 4),
    ("encoder and decoder", "1f1b", 3),
    ("dropout", "zb-v", 2),
    ("metrics", "dualpipev", 2),
    ("adafactor", "1f1b", 2),
    ("penalty on weights", "gpipe", 3),
    ("experts and keys", "1f1b", 2),
    ("nnx batch norm and dropout", "gpipe", 2),
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
ROWS = QUICK | {  # every step under three of these, each of which comes with a third of the steps
    (name, *EACH[(i + k) % len(EACH)]) for i, name in enumerate(STEPS) for k in (0, 3, 5)
}


@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.full) for row in sorted(ROWS)],
)
def test_a_step_in_stages_has_the_plain_steps_numbers(name, schedule, stages):
    found = checked(STEPS[name](), stages, 4, schedule, 2 if schedule == "interleaved" else None)
    assert found.passed and found.max_abs_diff < 1e-5, found


@pytest.mark.full
def test_products_in_bfloat16_differ_by_their_rounding():
    found = checked(steps.half(), 2, 4)
    assert found.passed and found.max_abs_diff < 3e-4, found
