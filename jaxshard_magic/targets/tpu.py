"""TPU slices that aren't attached, compiled for by libtpu."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ..errors import ShardError
from ..packages import install_command, installed, jax_requirements, satisfies
from ..temporary import ChangeGroup, Replaced, item

HOST = (2, 2, 1)  # chips of a host per dimension, in slices that divide into such hosts
SINGLE_HOST = 8  # most chips of one host


def missing() -> ShardError | None:
    """Return the reason why nothing compiles for TPUs here; None if it does.

    A libtpu that does not pair with the running jax is named, with the line to install the right one.
    """
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return ShardError(
            f"no TPU compiler on {system} {machine}: libtpu is made for Linux on x86_64 alone. A Linux container or "
            "a Colab notebook has it"
        )
    versions = installed()
    found, asked = versions["libtpu"], jax_requirements().get("libtpu", "")
    line = install_command("tpu", f"jax=={versions['jax']}")  # pip then takes the libtpu that pairs with it
    if found is None and find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        return ShardError(f"no TPU compiler: libtpu is not installed. Run {line}", fix=line)
    if found is not None and not satisfies(found, asked):
        return ShardError(
            f"libtpu {found} does not pair with jax {versions['jax']}, which needs libtpu{asked}. Run {line}", fix=line
        )
    return None


def attached() -> bool:
    """Return whether this machine has TPU chips, by a look at the bus like JAX's own."""
    from jax._src.hardware_utils import num_available_tpu_chips_and_device_id

    return num_available_tpu_chips_and_device_id()[0] > 0


def topology_options(key: str, extent: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `get_topology_desc` for a slice.

    Args:
        key: Short name of the chip.
        extent: Chips per dimension.

    >>> topology_options("v5e", (4, 4))
    {'topology_name': 'v5e:4x4'}
    >>> topology_options("v5e", (1, 1))
    {'topology_name': 'v5e:1x1', 'chips_per_host_bounds': [1, 1, 1]}
    """
    asked: dict[str, Any] = {"topology_name": f"{key}:{'x'.join(map(str, extent))}"}
    bounds = [*extent, 1][:3]
    if any(n % host for n, host in zip(bounds, HOST, strict=True)):
        asked["chips_per_host_bounds"] = bounds if math.prod(bounds) <= SINGLE_HOST else [1, 1, 1]
    if key == "v4":
        asked["chip_config_name"] = "megacore"  # both cores of a chip as one device, as JAX shows an attached v4
    return asked


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the devices of a topology; `jax.devices()` is not changed.

    Args:
        topology: Arguments for `get_topology_desc`.
    """
    from jax.experimental import topologies

    return tuple(topologies.get_topology_desc(**topology).devices)


def environment() -> dict[str, str]:
    """Return variables under which libtpu loads without a TPU, queries no server for one, and tolerates a second
    process."""
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def variables(given: Mapping[str, str]) -> ChangeGroup:
    """Return a context in which environment variables of this process are set."""
    return ChangeGroup(*(Replaced(item(os.environ, name), value) for name, value in given.items()))
