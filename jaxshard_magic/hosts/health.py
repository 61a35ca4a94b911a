"""The hosts of a cluster examined from the kernel: who answers, then what each finds of the others. It always ends."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from ..doctor.findings import Finding
from ..doctor.hosts import Host, findings
from ..doctor.reach import LIMIT_S, Reached, reach
from ..packages import running
from .cluster import Cluster
from .watch import TICK_S, how, is_gone

ANSWER_S = 5.0  # longer than the hub takes to find out that a host is frozen
_numbers = count()


def examined(cluster: Cluster) -> Iterator[Finding]:
    """One finding each, of hosts that are between two cells. Hosts that don't answer within 5 s are told, and then
    nothing that takes all of them is tried."""
    hosts = [Host(j.machine, j.versions, j.platform, j.kind, len(j.devices)) for j in cluster.joined]
    gone = _gone(cluster)
    reached: Sequence[Reached | None] = ()
    if not gone:
        name = f"jaxshard/doctor/{cluster.token}/{next(_numbers)}"
        found, gone = _asked(cluster, reach, (name,), LIMIT_S)
        reached = [found.get(host) for host in range(len(cluster))]
    yield from findings(hosts, gone, reached, cluster.again, running())


def _gone(cluster: Cluster) -> dict[int, str]:
    if cluster.died is not None:
        left = cluster.survivors
        return {host: cluster.died for host in range(len(cluster)) if host not in left}
    return _asked(cluster, running, (), ANSWER_S)[1]


def _asked(
    cluster: Cluster, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """What a function gives on each host, and why it gives nothing on others. It waits so long, and not for others
    where one is gone."""
    from ipyparallel.error import EngineError, RemoteError

    if missing := cluster.missing():
        return {}, {host: how(cluster, host) for host in missing}
    asked = [cluster.client[i].apply_async(function, *args) for i in cluster.ids]
    end = time.monotonic() + seconds
    found: dict[int, Any] = {}
    lost: dict[int, str] = {}
    while not lost and len(found) < len(asked) and time.monotonic() < end:
        time.sleep(TICK_S)
        for host, each in enumerate(asked):
            if host in found:
                continue
            if is_gone(cluster, host, each):
                lost[host] = how(cluster, host)
            elif each.ready():
                try:
                    found[host] = each.get(0)
                except EngineError:
                    lost[host] = how(cluster, host)
                except RemoteError as error:
                    died = error.ename == EngineError.__name__
                    lost[host] = how(cluster, host) if died else f"{error.ename}: {error.evalue}"
    silent = f"has not answered within {seconds:g} s: it is frozen, or busy with something else"
    return found, lost or {host: silent for host in range(len(asked)) if host not in found}
