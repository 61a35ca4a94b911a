"""Findings about devices: those in use by JAX, and accelerators of the machine that JAX does not use."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..packages import CUDA, TPU
from ..units import limit_text
from .environment import INSTALL_CUDA, INSTALL_TPU, Versions
from .findings import DoctorFinding, one_line

AREA = "devices"
SMI_LIMIT_S = 10.0
PCI = Path("/sys/bus/pci/devices")

# PCI vendor id of Google, and device ids of its TPUs: its other PCI devices are network cards and disks.
GOOGLE = "0x1ae0"
TPU_IDS = ("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083")

# Regular expressions for the error of a backend that does not start, with remedies. The first match counts, so general
# expressions come last.
REMEDIES = (
    (
        r"in use by process with pid (\d+)",
        r"!kill \1 where that process is yours, or shut its notebook down; then restart this kernel",
    ),
    ("already in use", "shut the other notebook down that holds it, then restart this kernel"),
    ("lockfile", "!rm -f /tmp/libtpu_lockfile where no other process uses the TPU, then restart this kernel"),
    ("driver version is insufficient", "update the NVIDIA driver; this jax needs a newer one"),
    (
        "no supported devices|out of memory|OUT_OF_MEMORY",
        "!nvidia-smi tells which process holds the GPU's memory; end it, then restart this kernel",
    ),
    ("'tpu'|libtpu", INSTALL_TPU),
    ("'cuda'|'gpu'|cuda", INSTALL_CUDA),
)


@dataclass(frozen=True)
class SystemAccelerators:
    """Accelerators known to the operating system.

    Attributes:
        gpu: GPUs in words; None without one.
        tpu: TPU in words; None without one.
        broken: Failure of `nvidia-smi`; None without a failure.
    """

    gpu: str | None = None
    tpu: str | None = None
    broken: str | None = None


def devices(
    known: Versions, variables: Mapping[str, str], allowed: str = "", seen: SystemAccelerators | None = None
) -> Iterator[DoctorFinding]:
    """Yield findings about the devices of the default backend, then about accelerators that JAX does not use.

    Args:
        known: Installed versions by name.
        variables: Environment variables.
        allowed: Platforms that JAX may start, such as `cuda,cpu`; empty for all.
        seen: Accelerators of the machine; None detects them.
    """
    try:
        found = jax.devices()
    except RuntimeError as error:
        fixes = [_remedy(str(error)), _anew("JAX_PLATFORMS") if allowed else None]
        yield DoctorFinding(AREA, "jax", one_line(error), "error", "; or ".join(filter(None, fixes)) or None)
        found = []
    for platform in dict.fromkeys(d.platform for d in found):
        yield _row(platform, [d for d in found if d.platform == platform])
    seen = find_accelerators() if seen is None else seen
    used = {d.platform for d in found}
    on_gpu = bool(used & {"gpu", "cuda"})
    if seen.broken and not on_gpu:
        yield DoctorFinding(AREA, "NVIDIA GPU", seen.broken, "warning", "!nvidia-smi; reinstall or reload the driver")
    if seen.gpu and not on_gpu:
        yield _hidden("cuda", allowed, variables) or _unused(seen.gpu, "cuda", CUDA, INSTALL_CUDA, known)
    if seen.tpu and "tpu" not in used:
        yield _hidden("tpu", allowed, variables) or _unused(seen.tpu, "tpu", TPU, INSTALL_TPU, known)


def find_accelerators() -> SystemAccelerators:
    """Return the accelerators known to the operating system; starts no backend."""
    # Under WSL the GPU is /dev/dxg.
    broken, gpu = None, "GPU" if any(map(Path.exists, map(Path, ("/dev/nvidia0", "/dev/dxg")))) else None
    if shutil.which("nvidia-smi"):
        gpu, broken = _query_nvidia_smi()
    # Function 0 of each PCI device, so that a chip counts once.
    chips = sum(map(_is_tpu, PCI.glob("*.0")))
    return SystemAccelerators(gpu, f"TPU, {chips} {'chip' if chips == 1 else 'chips'}" if chips else None, broken)


def _query_nvidia_smi() -> tuple[str | None, str | None]:
    """Return the GPUs listed by `nvidia-smi`, and its error, either possibly None."""
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi does not answer: {one_line(error)}"
    kinds = re.findall(r"^GPU \d+: (?:NVIDIA )?(.*?) \(", run.stdout, re.MULTILINE)
    if kinds:
        return f"{len(kinds)} x {kinds[0]}", None
    said = (run.stdout + run.stderr).strip()
    # With a driver and no GPU nvidia-smi fails as well: that is no fault.
    if run.returncode and "No devices" not in said:
        return None, one_line(said or "nvidia-smi fails without a word")
    return None, None


def _is_tpu(slot: Path) -> bool:
    try:
        vendor, kind = ((slot / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return False
    return vendor == GOOGLE and kind in TPU_IDS


def _row(platform: str, found: list[Any]) -> DoctorFinding:
    kinds = " and ".join(dict.fromkeys(d.device_kind for d in found))
    processes = len({d.process_index for d in found})
    limit = next(filter(None, map(_limit, jax.local_devices(backend=platform))), None)
    parts = [f"{len(found)} x {kinds}", f"{limit_text(limit)} each" if limit else None]
    parts.append("simulated" if platform == "cpu" and len(found) > processes else None)
    parts.append(f"{processes} processes" if processes > 1 else None)
    return DoctorFinding(AREA, platform, ", ".join(filter(None, parts)))


def _hidden(platform: str, allowed: str, variables: Mapping[str, str]) -> DoctorFinding | None:
    """Return a warning where a setting hides an accelerator from JAX, else None."""
    what = "TPU" if platform == "tpu" else "NVIDIA GPU"
    names = {"cuda": {"cuda", "gpu"}}.get(platform, {platform})
    if allowed and not names & {name.strip() for name in allowed.split(",")}:
        text = f"there, but jax may start {allowed} only (JAX_PLATFORMS, or jax_platforms)"
        return DoctorFinding(AREA, what, text, "warning", _anew("JAX_PLATFORMS"))
    if platform == "cuda" and variables.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        text = "there, but CUDA_VISIBLE_DEVICES hides it"
        return DoctorFinding(AREA, what, text, "warning", _anew("CUDA_VISIBLE_DEVICES", "0"))
    return None


def _unused(what: str, platform: str, plugins: tuple[str, ...], install: str, known: Versions) -> DoctorFinding:
    """Return the reason for an accelerator that is visible to JAX and not used."""
    name = "TPU" if platform == "tpu" else "NVIDIA GPU"
    if not any(known.get(plugin) for plugin in plugins):
        return DoctorFinding(AREA, name, f"{what} there, but jax has no plugin for it", "error", install)
    try:
        return DoctorFinding(AREA, name, f"{len(jax.devices(platform))} there, not the default backend", "info")
    except RuntimeError as error:
        return DoctorFinding(AREA, name, one_line(error), "error", _remedy(str(error)) or install)


def _anew(variable: str, value: str = "") -> str:
    return f"restart the kernel, and before jax is imported: %env {variable}={value}"


def _remedy(message: str) -> str | None:
    for pattern, remedy in REMEDIES:
        if match := re.search(pattern, message):
            return match.expand(remedy) if match.re.groups else remedy
    return None


def _limit(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except RuntimeError:  # a platform without memory statistics
        return None
