"""Small steps compiled for a slice that isn't attached, each test with a cache of its own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxshard_magic
from jaxshard_magic import targets
from jaxshard_magic.targets import CompileResult, Target, compiler_of

MESH = "v5e:2x4 data=8"
Shape = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where this test's cache lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxshard_magic"


@pytest.fixture
def started(monkeypatch) -> list[Target]:
    """The targets whose compiler was asked."""
    asked = []
    monkeypatch.setattr(targets, "compiler_of", lambda target: asked.append(target) or compiler_of(target))
    return asked


def sgd(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def slow(w, x):
    """A step whose compile takes far longer than the waits below."""
    for i in range(200):
        x = jnp.sort(jnp.tanh(x @ w), axis=1) + i
    return x


def sharded(step=sgd, mesh=MESH):
    return jaxshard_magic.shard(step, "dp", mesh=mesh)


def built(step=sgd, width: int = 64, mesh: str = MESH) -> CompileResult:
    """`width` makes it another program."""
    shapes = Shape((width, width), jnp.float32), Shape((64, width), jnp.float32)
    return sharded(step, mesh).prepare(*shapes).compiled
