"""What is installed, which devices answer, and whether they reach each other: each failure with its remedy."""

import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..packages import companions, installed
from .findings import Doctor as Doctor
from .findings import Finding as Finding
from .findings import one_line
from .packages import loaded, targets, versions
from .setup import environment, notebook

if TYPE_CHECKING:
    from jax.sharding import Mesh


def examine(
    mesh: "Mesh | None", variables: Mapping[str, str] = os.environ, hosts: Iterable[Finding] | None = None
) -> Doctor:
    """Look at this machine: versions, devices, compile targets, variables, and the `mesh` axis by axis (None: that part
    is left out). The mesh's collectives run, with a time limit; nothing else is started that is not there.

    `hosts` is what was found of the hosts that this process uses; None looks at those that it is one of, if any.

    Where jax itself cannot be imported, that is a finding, and what needs no jax is told all the same.
    """
    known, needed, cpu_devices = installed(), companions(), -1
    broken = jax_error()
    findings = [*versions(known, needed, loaded(), sys.version_info[:2])]
    if broken is not None:
        failure = f"import jax fails: {one_line(broken)}"
        fix = "pip install --upgrade jax jaxlib; restart the kernel"
        findings.append(Finding("devices", "jax", failure, "error", fix))
    else:
        import jax

        from ..coordination import is_there
        from .connectivity import connectivity
        from .devices import devices
        from .processes import of_processes

        allowed, cpu_devices = (
            getattr(jax.config, f"jax_{name}") for name in ("platforms", "num_cpu_devices")
        )
        findings += devices(known, variables, allowed or "")
        findings += connectivity(mesh) if mesh is not None else ()
        if hosts is None and is_there():
            findings += of_processes()
    findings += hosts or ()
    findings += [*targets(known, needed), *environment(variables, cpu_devices), *notebook(known)]
    return Doctor(tuple(findings))


@cache
def jax_error() -> Exception | None:
    """Why jax cannot be imported, as the first attempt said it, since a second one trips over the first; None where it
    can."""
    try:
        import_module("jax")
    except Exception as error:  # whatever a broken installation raises
        return error
    return None
