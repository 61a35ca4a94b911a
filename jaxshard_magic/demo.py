"""Demo of `jaxshard demo`: a small CNN on scikit-learn's digits, in the terminal, under two strategies."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from jaxshard_magic import api
from jaxshard_magic.display import writable
from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Report

RUNS = (("dp", "cpu:8 data=8"), ("fsdp", "cpu:8 data=8"))
BATCH = 128


@dataclass(frozen=True)
class Digits:
    """Digits for training and test.

    Attributes:
        images: float32[n, 8, 8, 1] in 0 to 1.
        labels: int32[n] in 0 to 9.
        test_images: As `images`.
        test_labels: As `labels`.
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """Training run.

    Attributes:
        report: Report of the step.
        losses: Loss of each step.
        accuracy: Share of test digits classified correctly.
    """

    report: Report
    losses: np.ndarray
    accuracy: float


class CNN(nnx.Module):
    """Two convolutions with BatchNorm and two dense layers: float32[n, 8, 8, 1] -> logits float32[n, 10]."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 64, 128, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def train_step(model, optimizer, batch):
    """Take one Adam step, written for one device.

    Updates the model and the optimizer; returns the loss.
    """

    def loss_fn(model):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def accuracy(model: CNN, digits: Digits) -> float:
    """Return the share of test digits classified correctly, computed on one device."""
    graph, state = nnx.split(model)
    # Parameters divided over devices are gathered, so that the model runs on one.
    whole = nnx.merge(graph, jax.device_get(state))
    whole.eval()
    logits = nnx.jit(lambda model, images: model(images))(whole, digits.test_images)
    return float((np.asarray(logits).argmax(-1) == digits.test_labels).mean())


def load_digits() -> Digits:
    """Return 1,797 scanned digits, shuffled; every fifth is for the test.

    Raises:
        ShardError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError as error:
        raise ShardError(
            "the demo's digits come with scikit-learn, which is not installed: pip install scikit-learn",
            fix="pip install scikit-learn",
        ) from error
    pixels, target = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(target))
    images = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = target[order].astype(np.int32)
    test = np.arange(len(labels)) % 5 == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def train(strategy: str, mesh_text: str, digits: Digits, steps: int) -> Outcome:
    """Train a fresh CNN under `strategy` for `steps` steps; the first step is checked against the plain one."""
    mesh = api.mesh(mesh_text)
    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    step = api.shard(train_step, strategy, mesh=mesh, check=True)
    step.programs.progress = lambda what: print(f"  {what}", flush=True) if what else None

    rng = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        rows = rng.choice(len(digits.labels), BATCH, replace=False)
        losses.append(step(model, optimizer, {"image": digits.images[rows], "label": digits.labels[rows]}))
    # Losses become numbers after the loop: reading one waits for its step.
    return Outcome(step.report(), np.array([float(loss) for loss in losses]), accuracy(model, digits))


def run(steps: int, html: Path) -> bool:
    """Train under each of `RUNS`, print the reports, and write the last report to `html`.

    Returns:
        Whether every sharded step gave the plain step's numbers.
    """
    digits = load_digits()
    # Before JAX starts a backend: the platform can't be changed later.
    jax.config.update("jax_platforms", "cpu")
    print(
        f"scikit-learn's digits: {len(digits.labels)} to train on, {len(digits.test_labels)} to test.\n"
        f"A CNN with BatchNorm (NNX, adam), {steps} steps of {BATCH} digits on 8 simulated CPU devices.\n"
    )
    outcomes = []
    for strategy, mesh_text in RUNS:
        print(f"%%shard {strategy} --mesh '{mesh_text}'")
        outcomes.append(train(strategy, mesh_text, digits, steps))
        print(f"\n{writable(outcomes[-1].report.to_text())}\n")

    for (strategy, _), outcome in zip(RUNS, outcomes, strict=True):
        first, last = outcome.losses[0], outcome.losses[-1]
        print(f"{strategy:8} loss {first:.4f} -> {last:.4f}   {outcome.accuracy:.1%} of the test set right")
    outcomes[-1].report.to_html(html)
    print(writable(f"Report: {html.resolve()}"))
    return all(outcome.report.check is not None and outcome.report.check.passed for outcome in outcomes)
