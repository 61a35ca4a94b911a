"""Findings about installed packages: missing ones, versions that don't fit JAX's, and compile targets."""

import sys
from collections.abc import Iterator, Mapping

from ..packages import CUDA, NEEDED, TPU, install_command, numbers, satisfies
from .findings import DoctorFinding

Versions = Mapping[str, str | None]

NEWEST_PYTHON = (3, 12)  # oldest Python that the newest jax runs on
INSTALL_TPU = 'pip install --upgrade "jax[tpu]"'
INSTALL_CUDA = 'pip install --upgrade "jax[cuda12]"'


def loaded() -> dict[str, str]:
    """Return the versions of JAX's packages imported by this process, by name."""
    imported = {name: getattr(sys.modules.get(name), "__version__", None) for name in NEEDED}
    return {name: str(running) for name, running in imported.items() if running}


def versions(
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
