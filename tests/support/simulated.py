"""A test of simulated devices in a process of its own, and what it makes there."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard_magic.config.mesh import BuiltMesh, MeshSpec, build

TESTS = Path(__file__).resolve().parents[1]
SET_BY_CONFTEST = ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS")


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run the test in a fresh process on one CPU device."""

    @functools.wraps(test)
    def run() -> None:
        here = Path(test.__code__.co_filename).parent
        path = [str(folder) for folder in (here, TESTS, TESTS.parent)]
        env = {k: v for k, v in os.environ.items() if k not in SET_BY_CONFTEST}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path)}
        program = f"import {test.__module__} as tests; tests.{test.__name__}.__wrapped__()"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return run


def use(text: str, namespace: dict[str, Any] | None = None) -> BuiltMesh:
    return build(MeshSpec.parse(text), [{} if namespace is None else namespace])


def spread(values: Any, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def on_new_devices(*arrays: jax.Array) -> bool:
    return all(x.devices() <= set(jax.devices()) for x in arrays)
