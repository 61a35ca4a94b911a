"""What is installed, which devices answer, and whether they reach each other: each failure with its remedy."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .connectivity import connectivity
from .devices import devices
from .findings import Doctor as Doctor
from .findings import Finding as Finding
from .setup import environment, installed, notebook, targets, versions

if TYPE_CHECKING:
    from jax.sharding import Mesh


def examine(mesh: "Mesh | None", variables: Mapping[str, str] = os.environ) -> Doctor:
    """Look at this machine: versions, devices, compile targets, variables, and the `mesh` axis by axis (None: that part
    is left out). The mesh's collectives run, with a time limit; nothing else is started that is not there."""
    known = installed()
    found = [
        *versions(known, sys.version_info[:2]),
        *devices(known, variables),
        *targets(known),
        *(connectivity(mesh) if mesh is not None else ()),
        *environment(variables),
        *notebook(known),
    ]
    return Doctor(tuple(found))
