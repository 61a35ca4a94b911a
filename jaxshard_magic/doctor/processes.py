"""The hosts of a program that is started on each of them, examined from within: all of its processes come here."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from platform import node

import jax

from ..packages import running
from .findings import Finding
from .hosts import AREA, Host, findings
from .reach import REDUCE_S, SERVICE_S, Reached, exchanged, reach

AGAIN = "start the program again on all hosts"
_numbers = count()  # of examinations: each process comes to these in the same order


def of_processes() -> Iterator[Finding]:
    """What each process of `jax.distributed` finds of all of them, which come here together. It ends within two
    minutes, also where one does not come."""
    name = f"jaxshard/doctor/{next(_numbers)}"
    said = exchanged(f"{name}/host", json.dumps(asdict(this_host())), SERVICE_S)
    if gone := [f"host {host}" for host, each in enumerate(said) if each is None]:
        fix = f"call doctor() on all hosts; where they do, {AGAIN}"
        late = f"{', '.join(gone)}: not come to this examination within {SERVICE_S:g} s"
        yield Finding(AREA, "hosts", late, "error", fix)
        return
    hosts = [Host(**json.loads(each)) for each in said if each is not None]
    told = exchanged(f"{name}/found", json.dumps(asdict(reach(name))), REDUCE_S + SERVICE_S)
    yield from findings(hosts, {}, [None if each is None else _reached(each) for each in told], AGAIN)


def this_host() -> Host:
    """This process, as the others get to know it."""
    own = jax.local_devices()
    return Host(node(), running(), own[0].platform, own[0].device_kind, len(own))


def _reached(text: str) -> Reached:
    said = json.loads(text)
    reduced = said["reduced"]
    return Reached(
        tuple(said["heard"]),
        tuple((peer, each) for peer, each in said["pairs"]),
        tuple(reduced) if isinstance(reduced, list) else reduced,
    )
