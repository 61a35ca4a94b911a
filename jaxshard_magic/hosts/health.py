"""Examine the hosts of a cluster from the kernel, within a time limit."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from ..doctor.findings import DoctorFinding
from ..doctor.hosts import Host, host_findings
from ..doctor.reachability import LIMIT_S, Reachability, reach
from ..packages import program_versions
from .cell_run import TICK_S, describe_loss, is_gone
from .cluster import Cluster

ANSWER_S = 5.0  # longer than the hub takes to notice a frozen host
_numbers = count()  # in names of keys and barriers, each of which is used once


def examine_hosts(cluster: Cluster) -> Iterator[DoctorFinding]:
    """Yield the findings about hosts, between two cells.

    Hosts get 5 s to answer. With a host missing, collectives and other checks that take all hosts are left out.

    Args:
        cluster: Hosts.
    """
    hosts = [Host(j.machine, j.versions, j.platform, j.kind, len(j.devices)) for j in cluster.joined]
    gone = _unresponsive_hosts(cluster)
    reached: Sequence[Reachability | None] = ()
    if not gone:
        name = f"jaxshard/doctor/{cluster.token}/{next(_numbers)}"
        found, gone = _call_all(cluster, reach, (name,), LIMIT_S)
        reached = [found.get(host) for host in range(len(cluster))]
    yield from host_findings(hosts, gone, reached, cluster.restart_hint, program_versions())


def _unresponsive_hosts(cluster: Cluster) -> dict[int, str]:
    """Return the reason of each host that does not answer, by host."""
    if cluster.death_reason is not None:
        left = cluster.survivors
        return {host: cluster.death_reason for host in range(len(cluster)) if host not in left}
    return _call_all(cluster, program_versions, (), ANSWER_S)[1]


def _call_all(
    cluster: Cluster, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """Call a function on all hosts; give up on the others as soon as one is dead.

    Args:
        cluster: Hosts.
        function: Function to call.
        args: Arguments.
        seconds: Time limit.

    Returns:
        Results by host; and reasons by host: of dead or failing hosts, else of all hosts without an answer in time.
    """
    from ipyparallel.error import EngineError, RemoteError

    if missing := cluster.lost_hosts():
        return {}, {host: describe_loss(cluster, host) for host in missing}
    calls = [cluster.client[i].apply_async(function, *args) for i in cluster.ids]
    end = time.monotonic() + seconds
    results: dict[int, Any] = {}
    lost: dict[int, str] = {}
    while not lost and len(results) < len(calls) and time.monotonic() < end:
        time.sleep(TICK_S)
        for host, each in enumerate(calls):
            if host in results:
                continue
            if is_gone(cluster, host, each):
                lost[host] = describe_loss(cluster, host)
            elif each.ready():
                try:
                    results[host] = each.get(0)
                except EngineError:
                    lost[host] = describe_loss(cluster, host)
                except RemoteError as error:
                    died = error.ename == EngineError.__name__
                    lost[host] = describe_loss(cluster, host) if died else f"{error.ename}: {error.evalue}"
    silent = f"has not answered within {seconds:g} s: it is frozen, or busy with something else"
    return results, lost or {host: silent for host in range(len(calls)) if host not in results}
