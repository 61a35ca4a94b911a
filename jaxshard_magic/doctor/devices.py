"""Which devices answer, and why those that are there do not."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from .findings import Finding
from .setup import CUDA, Installed

AREA = "devices"
GIB = 2**30
_BUSY = "already in use"


def devices(
    known: Installed, variables: Mapping[str, str], seen: tuple[bool, bool] | None = None
) -> Iterator[Finding]:
    """The devices of the default backend, then accelerators that the machine has and jax does not use.

    `seen`: whether there is an NVIDIA GPU, and a TPU; None looks for them.
    """
    try:
        found = jax.devices()
    except RuntimeError as error:
        yield Finding(AREA, "jax", _first_line(error), "error", _remedy(str(error)))
        found = []
    for platform in dict.fromkeys(d.platform for d in found):
        yield _row(platform, [d for d in found if d.platform == platform])
    gpu, tpu = (_has_gpu(), _has_tpu()) if seen is None else seen
    used = {d.platform for d in found}
    if gpu and not used & {"gpu", "cuda"}:
        yield _unused("NVIDIA GPU", known, CUDA, 'pip install --upgrade "jax[cuda12]"', variables, "cuda")
    if tpu and "tpu" not in used:
        yield _unused("TPU", known, ("libtpu",), 'pip install --upgrade "jax[tpu]"', variables, "tpu")


def _row(platform: str, found: list[Any]) -> Finding:
    kinds = " and ".join(dict.fromkeys(d.device_kind for d in found))
    processes = len({d.process_index for d in found})
    limit = _limit(found[0])
    parts = [f"{len(found)} x {kinds}", f"{limit / GIB:.3g} GiB each" if limit else ""]
    parts.append(f"{processes} processes" if processes > 1 else "")
    return Finding(AREA, platform, ", ".join(filter(None, parts)))


def _unused(
    what: str,
    known: Installed,
    plugins: tuple[str, ...],
    install: str,
    variables: Mapping[str, str],
    platform: str,
) -> Finding:
    """Why an accelerator that is there is not used."""
    allowed = variables.get("JAX_PLATFORMS", "")
    if allowed and platform not in allowed.split(","):
        text = f"hidden by JAX_PLATFORMS={allowed}"
        return Finding(AREA, what, text, "warning", "unset JAX_PLATFORMS and restart the kernel")
    if not any(known.get(plugin) for plugin in plugins):
        return Finding(AREA, what, "there, but jax has no plugin for it", "error", install)
    try:
        return Finding(AREA, what, f"{len(jax.devices(platform))} there, not the default backend", "info")
    except RuntimeError as error:
        return Finding(AREA, what, _first_line(error), "error", _remedy(str(error)) or install)


def _remedy(message: str) -> str | None:
    if _BUSY in message:
        return "stop the other process that holds it (another notebook's kernel), then restart this one"
    if "libtpu" in message:
        return 'pip install --upgrade "jax[tpu]"'
    if "cuda" in message.lower():
        return 'pip install --upgrade "jax[cuda12]"'
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _limit(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        return None


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*"))
