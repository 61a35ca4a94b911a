"""What can be told without starting anything: packages, compile targets, environment variables, the notebook."""

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from .findings import Finding

Installed = Mapping[str, str | None]

NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ipython", "ipywidgets", "anywidget", "plotly")
TPU = ("libtpu",)
CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin")
NEWEST_PYTHON = (3, 12)  # what the newest jax asks for

# What each variable does; a value that matches the expression harms.
VARIABLES: dict[str, tuple[str, str | None, str | None]] = {
    "JAX_PLATFORMS": ("the only platforms that jax starts", None, None),
    "XLA_FLAGS": ("options of the compiler", None, None),
    "LIBTPU_INIT_ARGS": ("options of the TPU compiler", None, None),
    "JAX_DISABLE_JIT": (
        "every operation runs by itself",
        "1|true",
        "unset JAX_DISABLE_JIT to compile",
    ),
    "JAX_DEBUG_NANS": (
        "every step is checked for NaN, and waits for it",
        "1|true",
        "unset JAX_DEBUG_NANS to train",
    ),
    "JAX_ENABLE_X64": (
        "64-bit types are kept",
        "1|true",
        "unset JAX_ENABLE_X64 where float32 will do",
    ),
    "JAX_COMPILATION_CACHE_DIR": ("where compiled programs are kept", None, None),
    "JAX_NUM_CPU_DEVICES": ("simulated CPU devices", None, None),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("whether a GPU's memory is taken at the start", None, None),
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ("how much of a GPU's memory is taken", None, None),
    "XLA_PYTHON_CLIENT_ALLOCATOR": (
        "how GPU memory is taken",
        "platform",
        "unset XLA_PYTHON_CLIENT_ALLOCATOR: platform is slow, and meant for debugging",
    ),
    "CUDA_VISIBLE_DEVICES": (
        "the GPUs that are seen",
        "|-1",
        "unset CUDA_VISIBLE_DEVICES: it hides every GPU",
    ),
    "TPU_VISIBLE_CHIPS": ("the TPU chips that are seen", None, None),
    "TPU_PROCESS_BOUNDS": ("how processes share the TPU", None, None),
    "NPROC": (
        "threads that jax makes on CPU",
        "[0-7]",
        "set NPROC=32 before jax starts: few threads can stall simulated devices",
    ),
}
_FORCED = re.compile(r"--?xla_force_host_platform_device_count=(\d+)")


def installed() -> dict[str, str | None]:
    """The versions of the packages that matter, None for those that are missing."""
    return {name: _version(name) for name in (*NEEDED, *TPU, *CUDA)}


def versions(known: Installed, python: tuple[int, int]) -> Iterator[Finding]:
    """Python and the packages, and whether jax and jaxlib go together."""
    area, text = "versions", ".".join(map(str, python))
    if python < NEWEST_PYTHON:
        newer = ".".join(map(str, NEWEST_PYTHON))
        yield Finding(area, "python", f"{text}; the newest jax needs {newer}", "info")
    else:
        yield Finding(area, "python", text)
    for name in NEEDED:
        found = known.get(name)
        if found is None:
            yield Finding(area, name, "not installed", "error", f"pip install {name}")
        elif name == "jaxlib" and _minor(found) != _minor(known.get("jax")):
            mixed = f"{found}, but jax is {known.get('jax')}"
            yield Finding(area, name, mixed, "error", "pip install --upgrade jax jaxlib")
        else:
            yield Finding(area, name, found)


def targets(known: Installed) -> Iterator[Finding]:
    """The kinds of hardware that an installed compiler can compile for, attached or not."""
    area = "compilers"
    yield Finding(area, "cpu", "with jax")
    tpu = known.get("libtpu")
    yield (
        Finding(area, "tpu", f"libtpu {tpu}")
        if tpu
        else Finding(area, "tpu", "not installed", "info", "pip install libtpu")
    )
    cuda = next((f"{name} {known[name]}" for name in CUDA if known.get(name)), None)
    yield (
        Finding(area, "cuda", cuda)
        if cuda
        else Finding(area, "cuda", "not installed", "info", 'pip install "jax[cuda12]"')
    )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """The variables that are set and change what jax does; no other is shown."""
    area = "environment"
    found = False
    for name, (does, harmful, remedy) in VARIABLES.items():
        if (value := variables.get(name)) is None:
            continue
        found = True
        harms = harmful is not None and re.fullmatch(harmful, value.strip().lower()) is not None
        yield Finding(
            area, name, f"{value or 'empty'}: {does}", "warning" if harms else "ok", remedy if harms else None
        )
        if name == "XLA_FLAGS" and (forced := _FORCED.search(value)):
            message = f"{forced[0].lstrip('-')} fixes the number of CPU devices when jax starts"
            fix = f"take it out of XLA_FLAGS: %mesh cpu:{forced[1]} data={forced[1]} makes them when they are needed"
            yield Finding(area, name, message, "warning", fix)
    if not found:
        yield Finding(area, "variables", "none that matters is set")


def notebook(known: Installed) -> Iterator[Finding]:
    """How reports can be shown."""
    missing = [name for name in ("ipywidgets", "anywidget") if known.get(name) is None]
    if missing:
        shown = f"HTML instead of widgets: {' and '.join(missing)} missing"
        yield Finding("notebook", "reports", shown, "warning", f"pip install {' '.join(missing)}")
    else:
        yield Finding("notebook", "reports", "widgets, with HTML for where none run")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _minor(text: str | None) -> list[str]:
    return (text or "").split(".")[:2]
