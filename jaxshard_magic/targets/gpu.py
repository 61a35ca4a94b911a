"""NVIDIA GPUs that aren't attached, compiled for by JAX's CUDA plugin and by ptxas, NVIDIA's assembler."""

import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ShardError, list_names
from ..hardware import DEFAULT_SHARE, Chip, chips
from ..packages import CUDA, install_command, installed, jax_requirements, satisfies

MACHINES = ("x86_64", "aarch64")
SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the newer name first, as jax reads them
TOOLKITS = ("cu13", "cuda_nvcc")  # folders of NVIDIA's pip packages, in JAX's search order
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
CONFIG = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads_per_core_limit}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  shared_memory_per_core: {shared_memory_per_core}
  core_count: {core_count}
  fpus_per_core: {fpus_per_core}
  clock_rate_ghz: {clock_rate_ghz}
  l2_cache_size: {l2_cache_size}
  memory_bandwidth: {memory_bandwidth}
  device_memory_size: {device_memory_size}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device_kind}"
"""


def topology_options(chip: Chip, nodes: int, gpus: int) -> dict[str, str]:
    """Return the arguments of `get_topology_desc` for nodes of GPUs.

    A node is a partition with one host, as XLA forms it with several processes
    (https://github.com/openxla/xla/blob/main/xla/pjrt/distributed/topology_util.cc).

    Args:
        chip: Kind of GPU.
        nodes: Number of nodes.
        gpus: GPUs per node.

    >>> from jaxshard_magic.hardware import chip
    >>> topology_options(chip("a100"), 2, 8)["topology"]
    '2x1x8'
    """
    return {"topology": f"{nodes}x1x{gpus}", "target_config": target_config(chip)}


def target_config(chip: Chip) -> str:
    """Return a chip as XLA's GpuTargetConfigProto in text form
    (https://github.com/openxla/xla/blob/main/xla/stream_executor/device_description.proto).

    Raises ShardError for a chip that is no GPU.
    """
    if chip.compiler is None:
        raise ShardError(f"{chip.name} is no GPU; those are {list_names(_gpus())}")
    major, minor, special = _capability(chip)
    return CONFIG.format(
        **chip.compiler,
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if special else "NONE",
        memory_bandwidth=int(chip.hbm_bandwidth),
        # XLA rematerializes what would not fit into this.
        device_memory_size=chip.visible or chip.hbm,
    )


def usable_bytes(chip: Chip, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the bytes that JAX leaves to programs on one GPU; None if the driver's figure is not known.

    Three quarters of the memory that the driver shows, or the fraction in XLA_CLIENT_MEM_FRACTION or its older name
    (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).

    Raises:
        ShardError: The fraction is no number above 0.

    >>> from jaxshard_magic.hardware import chip
    >>> usable_bytes(chip("h100"), {}) == chip("h100").usable
    True
    """
    name = next((n for n in SHARES if environ.get(n)), None)
    text = environ[name] if name else str(DEFAULT_SHARE)
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text) or not 0 < float(text) < math.inf:
        raise ShardError(f"{name}={text} is no share of a GPU's memory; it is a number as .9")
    return None if chip.visible is None else int(chip.visible * float(text))


def environment() -> dict[str, str]:
    """Return variables under which the plugin loads with neither a GPU nor CUDA's libraries to check.

    ptxas needs none: JAX tells XLA the folder that pip has installed it into.
    """
    return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def missing(chip: Chip | None = None) -> ShardError | None:
    """Return the reason why nothing compiles for NVIDIA GPUs here, or for a chip; None if it does.

    A plugin that does not pair with the running jax is named, with the line to install the right one.

    Args:
        chip: Chip to compile for; None to check the installation alone.
    """
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in MACHINES:
        return ShardError(
            f"no GPU compiler on {system} {machine}: jax's CUDA plugin is made for Linux alone, on "
            f"{' and '.join(MACHINES)}. A Linux container or a Colab notebook has it"
        )
    versions = installed()
    there = [name for name in CUDA if versions[name]]
    if not there or plugin() is None:
        name = "jax-cuda12-pjrt" if there else CUDA[0]
        return _without(f"no GPU compiler: {name} is not installed")
    asked = jax_requirements()
    for name in there:
        found, clauses = versions[name] or "", asked.get(name, "")
        if not satisfies(found, clauses):
            return _without(f"{name} {found} does not pair with jax {versions['jax']}, which needs {name}{clauses}")
    assembler = ptxas()
    if assembler is None:
        return _without("no GPU compiler: ptxas, of nvidia-cuda-nvcc-cu12, is not installed")
    known = architectures(assembler)
    if chip is None or not known or _architecture(chip) in known:
        return None
    works = list_names(key for key, other in _gpus().items() if _architecture(other) in known)
    return ShardError(
        f"{assembler} makes no code for {chip.name} ({_architecture(chip)}), but for {works}. "
        "The ptxas of CUDA 12 does for all"
    )


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the devices of a topology, one node after the other.

    Works before and after JAX has started its backends, and does not change `jax.devices()`. The variables of
    `environment` must be set.

    Args:
        topology: Arguments for `get_topology_desc`.
    """
    from jax.experimental import topologies

    asked = {"platform": "cuda", **topology}
    try:
        return tuple(topologies.get_topology_desc(**asked).devices)
    except NotImplementedError:
        # JAX has looked for plugins already and skipped this one: without a driver its check fails.
        import_module(plugin() or "").initialize()
        return tuple(topologies.get_topology_desc(**asked).devices)


def plugin() -> str | None:
    """Return the module of the installed CUDA plugin; None without one."""
    # `find_spec` of a submodule raises an error if the parent package is missing.
    if find_spec("jax_plugins") is None:
        return None
    names = (f"jax_plugins.xla_{name.split('-')[1]}" for name in CUDA)
    return next((name for name in names if find_spec(name)), None)


def ptxas() -> Path | None:
    """Return the path of NVIDIA's assembler, searched in the order of JAX and then XLA; None without one."""
    nvidia = find_spec("nvidia")
    folders = (nvidia and nvidia.submodule_search_locations) or ()
    roots = [Path(os.environ["CUDA_ROOT"])] if os.environ.get("CUDA_ROOT") else []
    roots += [Path(folder, toolkit) for toolkit in TOOLKITS for folder in folders]
    found = (root / "bin" / "ptxas" for root in (*roots, SYSTEM_TOOLKIT))
    on_path = shutil.which("ptxas")
    return next((path for path in found if path.is_file()), Path(on_path) if on_path else None)


@cache
def architectures(assembler: Path) -> frozenset[str]:
    """Return the architectures of an assembler, such as `{"sm_80", "sm_90a"}`; empty if it does not list them."""
    try:
        said = subprocess.run([assembler, "--help"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(re.findall(r"'(sm_\d+a?)'", said.stdout))


def _without(what: str) -> ShardError:
    """Return the error for a missing or unsuitable package, with the line to install it."""
    jax = installed()["jax"]
    # With jax at its version, pip takes the plugin that pairs with it.
    line = install_command("cuda-aot", *([f"jax=={jax}"] if jax else []))
    return ShardError(f"{what}. Run {line}", fix=line)


def _gpus() -> dict[str, Chip]:
    return {key: chip for key, chip in chips().items() if chip.kind == "gpu"}


def _capability(chip: Chip) -> tuple[str, str, str]:
    """Return the parts of a compute capability: ("9", "0", "a") of 9.0a."""
    found = re.fullmatch(r"(\d+)\.(\d)(a?)", (chip.compiler or {})["compute_capability"])
    assert found is not None
    major, minor, special = found.groups()
    return major, minor, special


def _architecture(chip: Chip) -> str:
    return "sm_" + "".join(_capability(chip))
