"""Findings about several hosts: answers, equal versions and devices, connections and their speed.

The hosts of a multi-host program examine themselves from within, in `process_findings`; all processes take part.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from platform import node

import jax

from ..packages import OURS, program_versions
from ..units import rate_text, seconds_text
from .connectivity import ring_rate
from .findings import DoctorFinding
from .reachability import BIG, REDUCE_S, SERVICE_S, SILENT, Reachability, exchange, reach

AREA = "hosts"
MOST = 8  # failed pairs listed one by one
BINDING = ("jax", "jaxlib", OURS)  # other versions make another program of the same cell
AGAIN = "start the program again on all hosts"
_numbers = count()  # number keys alike on all processes, which make the same examinations in the same order


@dataclass(frozen=True)
class Host:
    """Host to examine.

    Attributes:
        machine: Name of the machine.
        versions: Versions of the running packages, by name.
        platform: Platform of the local devices.
        kind: Kind of the local devices.
        devices: Number of local devices.
    """

    machine: str
    versions: Mapping[str, str]
    platform: str
    kind: str
    devices: int


def host_findings(
    hosts: Sequence[Host],
    gone: Mapping[int, str],
    reached: Sequence[Reachability | None],
    restart_hint: str,
    kernel: Mapping[str, str] | None = None,
) -> Iterator[DoctorFinding]:
    """Yield all findings about the hosts.

    Args:
        hosts: Hosts at the time of their join, in the order of JAX's processes.
        gone: Reason of each host that does not answer, by host.
        reached: Result of each host, None for a host without one; unused if hosts are gone.
        restart_hint: Instruction for starting the hosts again.
        kernel: Versions of the kernel, if the kernel is not one of the hosts.
    """
    yield from _answers(hosts, gone, restart_hint)
    yield from version_findings([host.versions for host in hosts], restart_hint, kernel)
    yield from device_findings(hosts, restart_hint)
    # Collectives would not end without one of the hosts.
    if gone:
        yield DoctorFinding(AREA, "reach", f"not tried, as {_host_names(gone)} does not answer", "info")
        return
    yield from _service(reached, hosts, restart_hint)
    yield from _pairs(reached, restart_hint)
    yield from _all_reduce(reached, hosts, restart_hint)


def version_differences(
    versions: Sequence[Mapping[str, str]], kernel: Mapping[str, str] | None = None
) -> dict[str, dict[str, list[str]]]:
    """Return the packages with different versions: package -> version -> hosts. Missing packages have version "none".

    Args:
        versions: Versions of each host, by package.
        kernel: Versions of the kernel, if the kernel is not one of the hosts.

    >>> version_differences([{"jax": "0.10.2"}, {"jax": "0.12.0"}])
    {'jax': {'0.10.2': ['host 0'], '0.12.0': ['host 1']}}
    """
    everybody = {f"host {host}": each for host, each in enumerate(versions)}
    if kernel is not None:
        everybody["the kernel"] = kernel
    differences: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(name for each in everybody.values() for name in each):
        by: dict[str, list[str]] = {}
        for who, each in everybody.items():
            by.setdefault(each.get(name, "none"), []).append(who)
        if len(by) > 1:
            differences[name] = by
    return differences


def versions_text(by: Mapping[str, Sequence[str]]) -> str:
    """Return the versions of one package in words.

    >>> versions_text({"0.10.2": ["host 0", "host 2"], "0.12.0": ["host 1"]})
    '0.10.2 on host 0, host 2; 0.12.0 on host 1'
    """
    return "; ".join(f"{version} {_on(who)}" for version, who in by.items())


def version_findings(
    of_hosts: Sequence[Mapping[str, str]], again: str, kernel: Mapping[str, str] | None = None
) -> Iterator[DoctorFinding]:
    """Yield a finding for each package with different versions, or a single one for equal versions."""
    different = version_differences(of_hosts, kernel)
    if not different:
        same = ", ".join(f"{name} {version}" for name, version in of_hosts[0].items())
        also = " and the kernel" if kernel is not None else ""
        yield DoctorFinding(AREA, "versions", f"the same on all {len(of_hosts)} hosts{also}: {same}")
    for name, by in different.items():
        most = Counter(each.get(name, "none") for each in of_hosts)
        wanted = max((version for version in most if version != "none"), key=lambda version: most[version])
        others = [each for version, who in by.items() if version != wanted for each in who]
        binds = name in BINDING and len(most) > 1
        then = f"; then restart {'the kernel and ' if 'the kernel' in others else ''}the hosts: {again}"
        remedy = f"{_on(others)}: {_installs(name, wanted)}{then}"
        yield DoctorFinding(AREA, name, versions_text(by), "error" if binds else "warning", remedy)


def device_findings(hosts: Sequence[Host], again: str) -> Iterator[DoctorFinding]:
    """Yield a finding about kind and number of the hosts' devices, which a mesh needs to be equal."""
    has = [f"{host.devices} x {host.kind}" for host in hosts]
    if len({host.kind for host in hosts}) > 1 or len({host.platform for host in hosts}) > 1:
        by = versions_text(_grouped(has))
        fix = f"a mesh takes devices of one kind: name hosts that have it in the %mesh line; now it is {again}"
        yield DoctorFinding(AREA, "devices", f"not of one kind: {by}", "error", fix)
    elif len({host.devices for host in hosts}) > 1:
        fewest = min(host.devices for host in hosts)
        few = [f"host {number}" for number, host in enumerate(hosts) if host.devices == fewest]
        fix = f"{_on(few)}: see which devices are hidden or broken; a mesh takes as many of each host, {fewest} now"
        yield DoctorFinding(AREA, "devices", f"not as many each: {versions_text(_grouped(has))}", "warning", fix)
    else:
        yield DoctorFinding(AREA, "devices", f"{has[0]} on each of {len(hosts)} hosts")


def _answers(hosts: Sequence[Host], gone: Mapping[int, str], again: str) -> Iterator[DoctorFinding]:
    if not gone:
        machines = ", ".join(dict.fromkeys(host.machine for host in hosts))
        yield DoctorFinding(AREA, "hosts", f"{len(hosts)} on {machines}, and all answer")
    for host, why in gone.items():
        yield DoctorFinding(AREA, f"host {host}", f"{why} (on {hosts[host].machine})", "error", again)


def _service(reached: Sequence[Reachability | None], hosts: Sequence[Host], again: str) -> Iterator[DoctorFinding]:
    everybody = set(range(len(hosts)))
    lost = {
        host: sorted(everybody - set(each.heard)) if each else sorted(everybody - {host})
        for host, each in enumerate(reached)
        if each is None or everybody - set(each.heard)
    }
    if not lost:
        said = f"each of {len(hosts)} hosts hears every other one through the coordinator on host 0"
        yield DoctorFinding(AREA, "coordination", said)
    fix = f"see that every host reaches the port of the coordinator on host 0 ({hosts[0].machine}); then {again}"
    for host, others in lost.items():
        said = f"host {host} has not heard {_host_names(others)} within {SERVICE_S:g} s"
        yield DoctorFinding(AREA, "coordination", said, "error", fix)


def _pairs(reached: Sequence[Reachability | None], again: str) -> Iterator[DoctorFinding]:
    """Yield findings about pairs of hosts: of the two times measured the slower one, or the failure."""
    outcomes: dict[tuple[int, int], float | str] = {}
    for host, each in enumerate(reached):
        for peer, said in each.pairs if each is not None else ():
            pair = (min(host, peer), max(host, peer))
            before = outcomes.get(pair, said)
            # Both hosts of a pair report; a failure counts more than any time.
            outcomes[pair] = max(before, said, key=lambda x: (isinstance(x, str), x if isinstance(x, float) else 0.0))
    failed = {pair: said for pair, said in outcomes.items() if isinstance(said, str)}
    every = len(reached) * (len(reached) - 1) // 2
    took = [(seconds, pair) for pair, seconds in outcomes.items() if not isinstance(seconds, str)]
    fix = f"see that these machines reach each other on all ports (a firewall, the wrong network); then {again}"
    for (one, other), said in list(failed.items())[:MOST]:
        why = "their all-reduce has not ended" if said == SILENT else f"their all-reduce failed: {said}"
        yield DoctorFinding(AREA, "pairs", f"host {one} and host {other}: {why}", "error", fix)
    if len(failed) > MOST:
        yield DoctorFinding(AREA, "pairs", f"and {len(failed) - MOST} more", "error", fix)
    if took:
        seconds, (one, other) = max(took)
        level = "ok" if len(took) == every else "info"
        slowest = f"the slowest, host {one} with host {other}, takes {seconds_text(seconds)} for 4 bytes"
        yield DoctorFinding(
            AREA, "pairs", f"{len(took)} of {every} pair{'s' * (every > 1)}: sums right; measured: {slowest}", level
        )
    elif not failed:
        yield DoctorFinding(AREA, "pairs", "not tried, as not all hosts hear each other", "info")


def _all_reduce(reached: Sequence[Reachability | None], hosts: Sequence[Host], again: str) -> Iterator[DoctorFinding]:
    name, n = "all-reduce", len(hosts)
    said = [each.reduced if each is not None else None for each in reached]
    times = [each for each in said if isinstance(each, tuple)]
    if len(times) == n:
        small, large = (max(each) for each in zip(*times, strict=True))
        rate = rate_text(ring_rate(n, BIG, large))
        took = f"measured: 4 bytes in {seconds_text(small)}, 16 MiB at {rate}"
        yield DoctorFinding(AREA, name, f"over {n} hosts, a device each, sums right; {took}{_simulated_note(hosts)}")
    elif failed := [(host, each) for host, each in enumerate(said) if isinstance(each, str)]:
        host, why = failed[0]
        text = f"over {n} hosts: {'it has not ended' if why == SILENT else why} (host {host})"
        yield DoctorFinding(AREA, name, text, "error", f"restart the hosts: {again}")
    else:
        yield DoctorFinding(AREA, name, "not tried, as not all pairs reach each other", "info")


def _simulated_note(hosts: Sequence[Host]) -> str:
    if hosts[0].platform != "cpu":
        return ""
    alone = len({host.machine for host in hosts}) == 1
    what = "a network or an accelerator" if alone else "an accelerator"
    return f"; simulated devices{' of one machine' if alone else ''}: times say nothing of {what}"


def _grouped(said: Sequence[str]) -> dict[str, list[str]]:
    by: dict[str, list[str]] = {}
    for host, each in enumerate(said):
        by.setdefault(each, []).append(f"host {host}")
    return by


def _installs(name: str, version: str) -> str:
    if name == "python":
        return f"an environment with Python {version}"
    return f"{name} {version}, as elsewhere" if name == OURS else f"pip install {name}=={version}"


def _on(who: Sequence[str]) -> str:
    hosts = ", ".join(each for each in who if each != "the kernel")
    kernel = "in the kernel" if "the kernel" in who else ""
    return " and ".join(part for part in (f"on {hosts}" if hosts else "", kernel) if part)


def _host_names(hosts: Mapping[int, str] | Sequence[int]) -> str:
    return " and ".join(f"host {host}" for host in hosts)


def process_findings() -> Iterator[DoctorFinding]:
    """Yield findings about all processes of `jax.distributed`.

    All processes must call it. It ends within two minutes, even without one of them.
    """
    name = f"jaxshard/doctor/{next(_numbers)}"
    said = exchange(f"{name}/host", json.dumps(asdict(_this_host())), SERVICE_S)
    if gone := [f"host {host}" for host, each in enumerate(said) if each is None]:
        fix = f"call doctor() on all hosts; where they do, {AGAIN}"
        late = f"{', '.join(gone)}: not come to this examination within {SERVICE_S:g} s"
        yield DoctorFinding(AREA, "hosts", late, "error", fix)
        return
    hosts = [Host(**json.loads(each)) for each in said if each is not None]
    told = exchange(f"{name}/found", json.dumps(asdict(reach(name))), REDUCE_S + SERVICE_S)
    yield from host_findings(hosts, {}, [None if each is None else _reached(each) for each in told], AGAIN)


def _this_host() -> Host:
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
