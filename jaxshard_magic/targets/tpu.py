"""TPU slices that aren't attached, through libtpu."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ..errors import ShardError
from ..packages import companions, fits, install, installed
from ..temporary import Joined, Replaced, item

HOST = (2, 2, 1)  # the chips of one host, where a slice divides into such
SINGLE_HOST = 8  # the most chips that one host has


def missing() -> ShardError | None:
    """Why nothing compiles for TPUs here; None where it does.

    A libtpu that the running jax does not pair with is named, with the line that installs the right one.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return ShardError(
            f"no TPU compiler on {system} {machine}: libtpu is made for Linux on x86_64 alone. A Linux container or "
            "a Colab notebook has it"
        )
    versions = installed()
    found, asked = versions["libtpu"], companions().get("libtpu", "")
    line = install("tpu", f"jax=={versions['jax']}")  # pip then takes the libtpu that pairs with it
    if found is None and find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        return ShardError(f"no TPU compiler: libtpu is not installed. Run {line}", fix=line)
    if found is not None and not fits(found, asked):
        return ShardError(
            f"libtpu {found} does not pair with jax {versions['jax']}, which needs libtpu{asked}. Run {line}",
            fix=line,
        )
    return None


def attached() -> bool:
    """Has this machine TPU chips? jax looks for them on the bus in the same way."""
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id

    return num_available_tpu_chips_and_device_id()[0] > 0


def options(key: str, extent: Sequence[int]) -> dict[str, Any]:
    """The topology of a slice with so many chips per dimension, as `get_topology_desc` takes it.

    >>> options("v5e", (4, 4))
    {'topology_name': 'v5e:4x4'}
    >>> options("v5e", (1, 1))
    {'topology_name': 'v5e:1x1', 'chips_per_host_bounds': [1, 1, 1]}
    """
    asked: dict[str, Any] = {"topology_name": f"{key}:{'x'.join(map(str, extent))}"}
    bounds = [*extent, 1][:3]
    if any(n % host for n, host in zip(bounds, HOST, strict=True)):
        asked["chips_per_host_bounds"] = bounds if math.prod(bounds) <= SINGLE_HOST else [1, 1, 1]
    if key == "v4":
        asked["chip_config_name"] = "megacore"  # one device a chip, as jax has it there
    return asked


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """The devices of a topology, given as to `get_topology_desc`; `jax.devices()` stays what it is."""
    from jax.experimental import topologies

    return tuple(topologies.get_topology_desc(**topology).devices)


def environment() -> dict[str, str]:
    """Variables under which libtpu loads where there is no TPU, asks no server for one, and beside another process."""
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def variables(given: Mapping[str, str]) -> Joined:
    """Set in the environment of this process while the body runs."""
    return Joined(*(Replaced(item(os.environ, name), value) for name, value in given.items()))
