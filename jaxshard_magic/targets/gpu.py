"""NVIDIA GPUs that aren't attached, through jax's CUDA plugin and NVIDIA's assembler, ptxas."""

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

from ..errors import ShardError, one_of
from ..hardware import DEFAULT_SHARE, Chip, chips
from ..packages import CUDA, companions, fits, install, installed

MACHINES = ("x86_64", "aarch64")
SHARES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # the newer name first, as jax reads them
TOOLKITS = ("cu13", "cuda_nvcc")  # where pip puts NVIDIA's, in the order in which jax looks
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


def options(chip: Chip, nodes: int, gpus: int) -> dict[str, str]:
    """The topology of so many nodes with so many GPUs each, as `get_topology_desc` takes it.

    A node is a partition with one host, as XLA finds it where several processes run
    (https://github.com/openxla/xla/blob/main/xla/pjrt/distributed/topology_util.cc).

    >>> from jaxshard_magic.hardware import chip
    >>> options(chip("a100"), 2, 8)["topology"]
    '2x1x8'
    """
    return {"topology": f"{nodes}x1x{gpus}", "target_config": target_config(chip)}


def target_config(chip: Chip) -> str:
    """The chip as XLA's GpuTargetConfigProto, in text form (https://github.com/openxla/xla/blob/main/xla/
    stream_executor/device_description.proto). Its memory matters: XLA computes anew what would not fit."""
    if chip.compiler is None:
        raise ShardError(f"{chip.name} is no GPU; those are {one_of(_gpus())}")
    major, minor, special = _capability(chip)
    return CONFIG.format(
        **chip.compiler,
        major=major,
        minor=minor,
        extension="ACCELERATED_FEATURES" if special else "NONE",
        memory_bandwidth=int(chip.hbm_bandwidth),
        device_memory_size=chip.visible or chip.hbm,
    )


def usable(chip: Chip, environ: Mapping[str, str] = os.environ) -> int | None:
    """Bytes that jax leaves to the programs on one GPU: three quarters of what the driver shows, or the share that
    XLA_CLIENT_MEM_FRACTION or its older name says (https://docs.jax.dev/en/latest/gpu_memory_allocation.html).

    Raises `ShardError` for a share that is no number above 0.

    >>> from jaxshard_magic.hardware import chip
    >>> usable(chip("h100"), {}) == chip("h100").usable
    True
    """
    name = next((n for n in SHARES if environ.get(n)), None)
    text = environ[name] if name else str(DEFAULT_SHARE)
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text) or not 0 < float(text) < math.inf:
        raise ShardError(f"{name}={text} is no share of a GPU's memory; it is a number as .9")
    return None if chip.visible is None else int(chip.visible * float(text))


def environment() -> dict[str, str]:
    """Variables under which the plugin loads where there is neither a GPU nor CUDA's libraries to look at.

    ptxas needs none: jax tells XLA where pip has put it.
    """
    return {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def missing(chip: Chip | None = None) -> ShardError | None:
    """Why nothing compiles for NVIDIA's GPUs here, or not for `chip`; None where it does.

    A plugin that the running jax does not pair with is named, with the line that installs the right one.
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
    asked = companions()
    for name in there:
        found, clauses = versions[name] or "", asked.get(name, "")
        if not fits(found, clauses):
            return _without(
                f"{name} {found} does not pair with jax {versions['jax']}, which needs {name}{clauses}"
            )
    assembler = ptxas()
    if assembler is None:
        return _without("no GPU compiler: ptxas, of nvidia-cuda-nvcc-cu12, is not installed")
    known = architectures(assembler)
    if chip is None or not known or _architecture(chip) in known:
        return None
    works = one_of(key for key, other in _gpus().items() if _architecture(other) in known)
    return ShardError(
        f"{assembler} makes no code for {chip.name} ({_architecture(chip)}), but for {works}. "
        "The ptxas of CUDA 12 does for all"
    )


def load(topology: Mapping[str, Any]) -> tuple[Any, ...]:
    """The devices of a topology, nodes one after the other; it is given as to `get_topology_desc`.

    It wants `environment`, works before and after jax has started its backends, and changes nothing about
    `jax.devices()`.
    """
    from jax.experimental import topologies

    asked = {"platform": "cuda", **topology}
    try:
        return tuple(topologies.get_topology_desc(**asked).devices)
    except NotImplementedError:
        # jax has looked for plugins before and left this one out: without a driver it fails its check.
        import_module(plugin() or "").initialize()
        return tuple(topologies.get_topology_desc(**asked).devices)


def plugin() -> str | None:
    """The module of the installed CUDA plugin, None without one."""
    if find_spec("jax_plugins") is None:
        return None
    names = (f"jax_plugins.xla_{name.split('-')[1]}" for name in CUDA)
    return next((name for name in names if find_spec(name)), None)


def ptxas() -> Path | None:
    """NVIDIA's assembler, where jax and then XLA look for it; None without one."""
    nvidia = find_spec("nvidia")
    folders = (nvidia and nvidia.submodule_search_locations) or ()
    roots = [Path(os.environ["CUDA_ROOT"])] if os.environ.get("CUDA_ROOT") else []
    roots += [Path(folder, toolkit) for toolkit in TOOLKITS for folder in folders]
    found = (root / "bin" / "ptxas" for root in (*roots, SYSTEM_TOOLKIT))
    on_path = shutil.which("ptxas")
    return next((path for path in found if path.is_file()), Path(on_path) if on_path else None)


@cache
def architectures(assembler: Path) -> frozenset[str]:
    """What an assembler makes code for: `{"sm_80", "sm_90a", ...}`; empty where it doesn't say."""
    try:
        said = subprocess.run([assembler, "--help"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(re.findall(r"'(sm_\d+a?)'", said.stdout))


def _without(what: str) -> ShardError:
    """jax stays at its version: pip then takes the plugin that pairs with it."""
    jax = installed()["jax"]
    line = install("cuda-aot", *([f"jax=={jax}"] if jax else []))
    return ShardError(f"{what}. Run {line}", fix=line)


def _gpus() -> dict[str, Chip]:
    return {key: chip for key, chip in chips().items() if chip.kind == "gpu"}


def _capability(chip: Chip) -> tuple[str, str, str]:
    """("9", "0", "a") of 9.0a."""
    found = re.fullmatch(r"(\d+)\.(\d)(a?)", (chip.compiler or {})["compute_capability"])
    assert found is not None
    major, minor, special = found.groups()
    return major, minor, special


def _architecture(chip: Chip) -> str:
    return "sm_" + "".join(_capability(chip))
