"""Findings about the installation: packages, environment variables read by JAX, and the display of reports.

The packages are JAX's own and the compilers for hardware that isn't attached: one may be missing, or not fit the
installed jax.
"""

import re
import sys
from collections.abc import Iterator, Mapping

from ..errors import parse_count
from ..packages import CUDA, NEEDED, TPU, install_command, numbers, satisfies
from .findings import DoctorFinding

Versions = Mapping[str, str | None]

NEWEST_PYTHON = (3, 12)  # oldest Python that the newest jax runs on
INSTALL_TPU = 'pip install --upgrade "jax[tpu]"'
INSTALL_CUDA = 'pip install --upgrade "jax[cuda12]"'
_YES = "y|yes|t|true|on|1"  # values that JAX reads as true
# Meaning of each variable, regular expression of harmful values, and remedy for these.
VARIABLES: dict[str, tuple[str, str | None, str | None]] = {
    "JAX_PLATFORMS": ("the only platforms that jax starts", None, None),
    "JAX_NUM_CPU_DEVICES": ("simulated CPU devices", None, None),
    "JAX_ENABLE_X64": ("whether 64-bit types are kept", None, None),
    "JAX_COMPILATION_CACHE_DIR": ("where compiled programs are kept", None, None),
    "JAX_DISABLE_JIT": (
        "whether every operation runs by itself",
        _YES,
        "unset JAX_DISABLE_JIT to compile: now nothing is fused, and collectives do not overlap",
    ),
    "JAX_DEBUG_NANS": (
        "whether every result is checked for NaN, and waited for",
        _YES,
        "unset JAX_DEBUG_NANS to train",
    ),
    "XLA_FLAGS": ("options of the compiler", None, None),
    "LIBTPU_INIT_ARGS": ("options of the TPU and its compiler", None, None),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("whether a GPU's memory is taken at the start", None, None),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("how much of a GPU's memory is taken", None, None),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (
        "how GPU memory is taken",
        "platform",
        "unset XLA_PYTHON_CLIENT_ALLOCATOR: platform is slow, and meant for debugging",
    ),
    "CUDA_VISIBLE_DEVICES": ("the GPUs that are seen", "|-1", "unset CUDA_VISIBLE_DEVICES: it hides every GPU"),
    "TPU_VISIBLE_CHIPS": ("the TPU chips that are seen", None, None),
    "TPU_VISIBLE_DEVICES": ("the TPU chips that are seen, an older name", None, None),
    "TPU_PROCESS_BOUNDS": ("how processes share the TPU", None, None),
    "TPU_CHIPS_PER_PROCESS_BOUNDS": ("the TPU chips of each process", None, None),
    "TPU_LIBRARY_PATH": ("the libtpu.so that is loaded", None, None),
    "NPROC": (
        "threads that jax makes on CPU",
        "[0-7]",
        "set NPROC=32 before jax starts: few threads can stall simulated devices",
    ),
}
FORCED = "xla_force_host_platform_device_count"


def loaded_versions() -> dict[str, str]:
    """Return the versions of JAX's packages imported by this process, by name."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in NEEDED}
    return {name: str(running) for name, running in imported.items() if running}


def package_findings(
    known: Versions, needed: Mapping[str, str], running: Mapping[str, str], python: tuple[int, int]
) -> Iterator[DoctorFinding]:
    """Yield findings about Python and the packages: missing ones, versions that don't fit JAX's, and packages replaced
    under this process.

    Args:
        known: Installed versions by name; None for missing packages.
        needed: Version specifiers that JAX has for its companion packages.
        running: Versions imported by this process.
        python: Version of Python.
    """
    area, text = "versions", ".".join(map(str, python))
    if python < NEWEST_PYTHON:
        newer = ".".join(map(str, NEWEST_PYTHON))
        yield DoctorFinding(area, "python", f"{text}; the newest jax needs {newer}", "info")
    else:
        yield DoctorFinding(area, "python", text)
    for name in NEEDED:
        version = known.get(name)
        if version is None:
            yield DoctorFinding(area, name, "not installed", "error", f"pip install {name}")
        elif not satisfies(version, needed.get(name, "")):
            mixed = f"{version}, but jax {known.get('jax')} needs {name}{needed[name]}"
            yield DoctorFinding(area, name, mixed, "error", "pip install --upgrade jax jaxlib")
        elif numbers(running.get(name, version)) != numbers(version):
            stale = f"{version} is installed, {running[name]} still runs in this process"
            yield DoctorFinding(area, name, stale, "warning", "restart the kernel")
        else:
            yield DoctorFinding(area, name, version)


def compiler_findings(known: Versions, needed: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield findings about the platforms with an installed compiler, attached or not; loads nothing.

    Args:
        known: Installed versions by name; None for missing packages.
        needed: Version specifiers that JAX has for its companion packages.
    """
    area = "compilers"
    yield DoctorFinding(area, "cpu", "with jax")
    for platform, names, extra in (("tpu", TPU, "tpu"), ("cuda", CUDA, "cuda-aot")):
        there = [name for name in names if known.get(name)]
        for name in there:
            version = known[name] or ""
            if satisfies(version, needed.get(name, "")):
                yield DoctorFinding(area, platform, f"{name} {version}")
            else:
                mixed = f"{name} {version}, but jax {known.get('jax')} needs {name}{needed[name]}"
                yield DoctorFinding(area, platform, mixed, "warning", install_command(extra, f"{name}{needed[name]}"))
        if not there:
            yield DoctorFinding(area, platform, "not installed", "info", install_command(extra))


def environment_findings(variables: Mapping[str, str], cpu_devices: int = -1) -> Iterator[DoctorFinding]:
    """Yield a finding for each variable that is set and changes JAX's behaviour; other variables are never shown.

    Args:
        variables: Environment variables.
        cpu_devices: JAX's setting `jax_num_cpu_devices`, -1 if not set.
    """
    area, found = "environment", False
    for name, (does, harmful, remedy) in VARIABLES.items():
        if name not in variables:
            continue
        found, value = True, variables[name].strip()
        harms = harmful is not None and re.fullmatch(harmful, value.lower()) is not None
        text = f"{value or 'empty'}: {does}"
        yield DoctorFinding(area, name, text, "warning" if harms else "ok", remedy if harms else None)
        if name == "XLA_FLAGS":
            yield from _flags(value, cpu_devices)
    if not found:
        yield DoctorFinding(area, "variables", "none that matters is set")


def _flags(value: str, cpu_devices: int) -> Iterator[DoctorFinding]:
    """Yield warnings about XLA_FLAGS: words that are no XLA flag, and a device count overridden by JAX's own
    setting."""
    area, name = "environment", "XLA_FLAGS"
    if not value.startswith("-"):  # XLA then reads its flags from a file of this name
        return
    for word in value.split():
        flag, _, number = word.lstrip("-").partition("=")
        if not re.match(r"--?xla_", word):
            message = f"{word!r} is no flag of XLA, which ends the process when it starts"
            yield DoctorFinding(area, name, message, "warning", f"take {word} out of XLA_FLAGS")
        elif flag == FORCED and cpu_devices not in (-1, parse_count(number) or cpu_devices):
            message = f"{number} CPU devices here, jax_num_cpu_devices={cpu_devices} elsewhere, which wins"
            yield DoctorFinding(area, name, message, "warning", f"take --{FORCED} out of XLA_FLAGS; %mesh makes them")


def display_findings(known: Versions) -> Iterator[DoctorFinding]:
    """Yield a finding about the display of reports: widgets or HTML."""
    missing = [name for name in ("ipywidgets", "anywidget") if known.get(name) is None]
    if missing:
        shown = f"HTML instead of widgets: {' and '.join(missing)} missing"
        yield DoctorFinding("notebook", "reports", shown, "warning", f"pip install {' '.join(missing)}")
    else:
        yield DoctorFinding("notebook", "reports", "widgets, with HTML for where none run; text in a terminal")
