"""Examine the hosts of a multi-host program from within; all processes take part."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from platform import node

import jax

from ..packages import program_versions
from .findings import DoctorFinding
from .hosts import AREA, Host, host_findings
from .reachability import REDUCE_S, SERVICE_S, Reachability, exchange, reach

AGAIN = "start the program again on all hosts"
_numbers = count()  # number keys alike on all processes, which make the same examinations in the same order


def process_findings() -> Iterator[DoctorFinding]:
    """Yield findings about all processes of `jax.distributed`.

    All processes must call it. It ends within two minutes, even without one of them.
    """
    name = f"jaxshard/doctor/{next(_numbers)}"
    said = exchange(f"{name}/host", json.dumps(asdict(this_host())), SERVICE_S)
    if gone := [f"host {host}" for host, each in enumerate(said) if each is None]:
        fix = f"call doctor() on all hosts; where they do, {AGAIN}"
        late = f"{', '.join(gone)}: not come to this examination within {SERVICE_S:g} s"
        yield DoctorFinding(AREA, "hosts", late, "error", fix)
        return
    hosts = [Host(**json.loads(each)) for each in said if each is not None]
    told = exchange(f"{name}/found", json.dumps(asdict(reach(name))), REDUCE_S + SERVICE_S)
    yield from host_findings(hosts, {}, [None if each is None else _reached(each) for each in told], AGAIN)


def this_host() -> Host:
    """Return the description of this process for the others."""
    own = jax.local_devices()
    return Host(node(), program_versions(), own[0].platform, own[0].device_kind, len(own))


def _reached(text: str) -> Reachability:
    """Return the `Reachability` in a process's JSON text."""
    said = json.loads(text)
    reduced = said["reduced"]
    return Reachability(
        tuple(said["heard"]),
        # JSON has turned tuples into lists.
        tuple((peer, each) for peer, each in said["pairs"]),
        tuple(reduced) if isinstance(reduced, list) else reduced,
    )
