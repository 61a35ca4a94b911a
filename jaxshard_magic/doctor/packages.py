"""Which packages are there, whether those of jax fit each other, and for what they can compile."""

import sys
from collections.abc import Iterator, Mapping

from ..packages import CUDA, NEEDED, TPU, fits, install, numbers
from .findings import Finding

Versions = Mapping[str, str | None]

NEWEST_PYTHON = (3, 12)  # what the newest jax asks for
INSTALL_TPU = 'pip install --upgrade "jax[tpu]"'
INSTALL_CUDA = 'pip install --upgrade "jax[cuda12]"'


def loaded() -> dict[str, str]:
    """The versions of those that this process has imported."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in NEEDED}
    return {name: str(running) for name, running in imported.items() if running}


def versions(
    known: Versions, needed: Mapping[str, str], running: Mapping[str, str], python: tuple[int, int]
) -> Iterator[Finding]:
    """Python and the packages: missing ones, a jaxlib that does not fit, and those replaced under this process.

    Args:
        known, running: the versions that are installed, and those that are imported.
        needed: what jax asks of its companions, as `companions` tells it.
    """
    area, text = "versions", ".".join(map(str, python))
    if python < NEWEST_PYTHON:
        newer = ".".join(map(str, NEWEST_PYTHON))
        yield Finding(area, "python", f"{text}; the newest jax needs {newer}", "info")
    else:
        yield Finding(area, "python", text)
    for name in NEEDED:
        version = known.get(name)
        if version is None:
            yield Finding(area, name, "not installed", "error", f"pip install {name}")
        elif not fits(version, needed.get(name, "")):
            mixed = f"{version}, but jax {known.get('jax')} needs {name}{needed[name]}"
            yield Finding(area, name, mixed, "error", "pip install --upgrade jax jaxlib")
        elif numbers(running.get(name, version)) != numbers(version):
            stale = f"{version} is installed, {running[name]} still runs in this process"
            yield Finding(area, name, stale, "warning", "restart the kernel")
        else:
            yield Finding(area, name, version)


def targets(known: Versions, needed: Mapping[str, str]) -> Iterator[Finding]:
    """The kinds of hardware for which a compiler is installed, attached or not; nothing is loaded."""
    area = "compilers"
    yield Finding(area, "cpu", "with jax")
    for platform, names, extra in (("tpu", TPU, "tpu"), ("cuda", CUDA, "cuda-aot")):
        there = [name for name in names if known.get(name)]
        for name in there:
            version = known[name] or ""
            if fits(version, needed.get(name, "")):
                yield Finding(area, platform, f"{name} {version}")
            else:
                mixed = f"{name} {version}, but jax {known.get('jax')} needs {name}{needed[name]}"
                yield Finding(area, platform, mixed, "warning", install(extra, f"{name}{needed[name]}"))
        if not there:
            yield Finding(area, platform, "not installed", "info", install(extra))
