"""Examine the installation: packages, devices, and connections between devices, with a remedy for each failure."""

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..packages import installed, jax_requirements
from .environment import (
    compiler_findings,
    display_findings,
    environment_findings,
    loaded_versions,
    package_findings,
)
from .findings import Doctor as Doctor
from .findings import DoctorFinding as DoctorFinding
from .findings import one_line

if TYPE_CHECKING:
    from jax.sharding import Mesh


def examine(
    mesh: "Mesh | None", variables: Mapping[str, str] = os.environ, host_findings: Iterable[DoctorFinding] | None = None
) -> Doctor:
    """Examine this machine: versions, devices, compile targets, environment variables, and the mesh axis by axis.

    Runs the mesh's collectives, with a time limit; starts nothing else. A failing import of JAX is a finding, and
    everything that needs no JAX is examined all the same.

    Args:
        mesh: Mesh to examine; None skips that part.
        variables: Environment variables.
        host_findings: Findings about the hosts used by this process. None examines the processes of `jax.distributed`,
            if this process is one of several.

    Returns:
        All findings.
    """
    known, needed, cpu_devices = installed(), jax_requirements(), -1
    broken = jax_error()
    findings = [*package_findings(known, needed, loaded_versions(), sys.version_info[:2])]
    if broken is not None:
        failure = f"import jax fails: {one_line(broken)}"
        fix = "pip install --upgrade jax jaxlib; restart the kernel"
        findings.append(DoctorFinding("devices", "jax", failure, "error", fix))
    else:
        import jax

        from ..coordination import is_multiprocess
        from .connectivity import connectivity
        from .devices import devices
        from .hosts import process_findings

        allowed, cpu_devices = (getattr(jax.config, f"jax_{name}") for name in ("platforms", "num_cpu_devices"))
        findings += devices(known, variables, allowed or "")
        findings += connectivity(mesh) if mesh is not None else ()
        if host_findings is None and is_multiprocess():
            findings += process_findings()
    findings += host_findings or ()
    findings += [
        *compiler_findings(known, needed),
        *environment_findings(variables, cpu_devices),
        *display_findings(known),
    ]
    return Doctor(tuple(findings))


@cache
def jax_error() -> Exception | None:
    """Return the exception of the first attempt to import JAX; None on success."""
    try:
        # Cached: a second attempt after a failed one raises another error, caused by the first.
        import_module("jax")
    except Exception as error:  # a broken installation may raise anything
        return error
    return None
