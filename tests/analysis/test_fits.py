"""Whether a step fits into a chip that isn't attached, on either side of the limit, for steps whose memory is known by
hand: the compiler, the report and the advice say the same."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jaxshard_magic
from jaxshard_magic.hardware import chip
from jaxshard_magic.targets import gpu
from jaxshard_magic.views.words import verdict

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
no_gpus = pytest.mark.skipif(gpu.missing() is not None, reason="jax's CUDA plugin is not installed")
WIDTH, F32 = 1024, 4
ROW = WIDTH * F32
MESHES = {
    "v5e": "v5e:1x1 data=1",
    "v6e": "v6e:2x2 data=4",
    "v5p": "v5p:2x2x1 data=4",
    "v4": "v4:2x2x1 data=4",
    "h100": "h100:8 data=8",
}
ROOM, NO_ROOM = 0.97, 1.03  # of what a program may use on one device


def shape(rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def sgd(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.sum(w * x[0]))(w)
    return w - 0.1 * grad, loss


def linear(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.sum(x * w))(w)
    return w - 0.1 * grad, loss


class Case(NamedTuple):
    """A step that holds `rows` rows on each device, all that is large of it in `held` arrays of as many."""

    step: Any
    strategy: str
    donate: bool
    held: int

    def arguments(self, rows: int, devices: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        large = shape(rows // self.held * devices)
        return (shape(1), large) if self.step is linear else (large, shape(devices))


CASES = {
    "old and new weights": Case(sgd, "fsdp", False, 2),
    "weights in place": Case(sgd, "fsdp", True, 1),
    "a batch": Case(linear, "dp", False, 1),
}
QUICK = {("v5e", "old and new weights")}
TABLE = [
    pytest.param(
        key,
        name,
        share,
        marks=[pytest.mark.ci if (key, name) in QUICK else pytest.mark.full, *[no_gpus] * (key == "h100")],
    )
    for key in MESHES
    for name in CASES
    for share in (ROOM, NO_ROOM)
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def compiled(key: str, name: str, share: float):
    """The entry and the report of a case that holds so large a share of what one device has, and those bytes."""
    case, usable = CASES[name], chip(key).usable
    assert usable is not None
    mesh = jaxshard_magic.mesh(MESHES[key])
    rows = int(share * usable) // ROW // 16 * 16
    step = jaxshard_magic.shard(case.step, case.strategy, mesh=mesh, donate=case.donate)
    entry = step.prepare(*case.arguments(rows, mesh.size))
    return entry, step.report(), rows * ROW


@pytest.mark.parametrize(("key", "name", "share"), TABLE)
def test_what_fits_is_told_from_what_does_not(key, name, share):
    entry, report, held = compiled(key, name, share)
    fits = share < 1
    if chip(key).kind == "tpu":
        assert (entry.compiled.refused is None) == fits
    device = report.memory.per_device[0]
    assert device.limit == chip(key).usable
    assert device.peak == pytest.approx(held, rel=0.01)
    assert (device.peak <= device.limit) == fits
    assert ("does-not-fit" in {a.code for a in report.advice}) == (not fits)
    assert verdict(report).ok == fits


@pytest.mark.ci
def test_the_same_weights_fit_in_place_and_not_twice():
    in_place, there = compiled("v5e", "weights in place", 0.6)[1:]
    rows = there // ROW
    step = jaxshard_magic.shard(sgd, "fsdp", mesh=MESHES["v5e"], donate=False)
    step.prepare(shape(rows), shape(1))
    (advice,) = (a for a in step.report().advice if a.code == "does-not-fit")
    assert advice.fix == "--donate"
    assert "does-not-fit" not in {a.code for a in in_place.advice}
