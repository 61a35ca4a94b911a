"""What is told of several hosts: who answers, whether they run the same and have the same, whether they reach each
other, and how fast."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..packages import OURS
from ..units import rate_text, seconds_text
from .connectivity import ring_rate
from .findings import Finding
from .reach import BIG, SERVICE_S, SILENT, Reached

AREA = "hosts"
MOST = 8  # pairs that are told one by one
BINDING = ("jax", "jaxlib", OURS)  # hosts with different ones make different programs of the same cell


@dataclass(frozen=True)
class Host:
    """One host: the machine that it runs on, the versions of what it runs by package, and its own devices."""

    machine: str
    versions: Mapping[str, str]
    platform: str
    kind: str
    devices: int


def findings(
    hosts: Sequence[Host],
    gone: Mapping[int, str],
    reached: Sequence[Reached | None],
    again: str,
    kernel: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    """All of it, one finding each.

    Args:
        hosts: in the order of jax's processes, as they were when they joined.
        gone: why hosts do not answer, by their numbers.
        reached: what each found, None for one that did not say; of no use where hosts are gone.
        again: what starts the hosts again.
        kernel: the versions of the process that they are used from, where that is none of them.
    """
    yield from _answers(hosts, gone, again)
    yield from versions([host.versions for host in hosts], again, kernel)
    yield from devices(hosts, again)
    if gone:
        yield Finding(AREA, "reach", f"not tried, as {_named(gone)} does not answer", "info")
        return
    yield from _service(reached, hosts, again)
    yield from _pairs(reached, again)
    yield from _all_reduce(reached, hosts, again)


def apart(
    versions: Sequence[Mapping[str, str]], kernel: Mapping[str, str] | None = None
) -> dict[str, dict[str, list[str]]]:
    """The packages of which not all have the same version: by package, by version, who has it ("none": nobody's).

    >>> apart([{"jax": "0.10.2"}, {"jax": "0.12.0"}])
    {'jax': {'0.10.2': ['host 0'], '0.12.0': ['host 1']}}
    """
    everybody = {f"host {host}": each for host, each in enumerate(versions)}
    if kernel is not None:
        everybody["the kernel"] = kernel
    found: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(name for each in everybody.values() for name in each):
        by: dict[str, list[str]] = {}
        for who, each in everybody.items():
            by.setdefault(each.get(name, "none"), []).append(who)
        if len(by) > 1:
            found[name] = by
    return found


def apart_text(by: Mapping[str, Sequence[str]]) -> str:
    """Who has which version.

    >>> apart_text({"0.10.2": ["host 0", "host 2"], "0.12.0": ["host 1"]})
    '0.10.2 on host 0, host 2; 0.12.0 on host 1'
    """
    return "; ".join(f"{version} {_on(who)}" for version, who in by.items())


def versions(
    of_hosts: Sequence[Mapping[str, str]], again: str, kernel: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """One finding for each package of which hosts have different versions, else one for all."""
    different = apart(of_hosts, kernel)
    if not different:
        same = ", ".join(f"{name} {version}" for name, version in of_hosts[0].items())
        also = " and the kernel" if kernel is not None else ""
        yield Finding(AREA, "versions", f"the same on all {len(of_hosts)} hosts{also}: {same}")
    for name, by in different.items():
        most = Counter(each.get(name, "none") for each in of_hosts)
        wanted = max((version for version in most if version != "none"), key=lambda version: most[version])
        others = [each for version, who in by.items() if version != wanted for each in who]
        binds = name in BINDING and len(most) > 1
        then = f"; then restart {'the kernel and ' if 'the kernel' in others else ''}the hosts: {again}"
        remedy = f"{_on(others)}: {_installs(name, wanted)}{then}"
        yield Finding(AREA, name, apart_text(by), "error" if binds else "warning", remedy)


def devices(hosts: Sequence[Host], again: str) -> Iterator[Finding]:
    """Whether hosts have devices of one kind, and as many each."""
    has = [f"{host.devices} x {host.kind}" for host in hosts]
    if len({host.kind for host in hosts}) > 1 or len({host.platform for host in hosts}) > 1:
        by = apart_text(_grouped(has))
        fix = (
            f"a mesh takes devices of one kind: name hosts that have it in the %mesh line; now it is {again}"
        )
        yield Finding(AREA, "devices", f"not of one kind: {by}", "error", fix)
    elif len({host.devices for host in hosts}) > 1:
        fewest = min(host.devices for host in hosts)
        few = [f"host {number}" for number, host in enumerate(hosts) if host.devices == fewest]
        fix = f"{_on(few)}: see which devices are hidden or broken; a mesh takes as many of each host, {fewest} now"
        yield Finding(AREA, "devices", f"not as many each: {apart_text(_grouped(has))}", "warning", fix)
    else:
        yield Finding(AREA, "devices", f"{has[0]} on each of {len(hosts)} hosts")


def _answers(hosts: Sequence[Host], gone: Mapping[int, str], again: str) -> Iterator[Finding]:
    if not gone:
        machines = ", ".join(dict.fromkeys(host.machine for host in hosts))
        yield Finding(AREA, "hosts", f"{len(hosts)} on {machines}, and all answer")
    for host, why in gone.items():
        yield Finding(AREA, f"host {host}", f"{why} (on {hosts[host].machine})", "error", again)


def _service(reached: Sequence[Reached | None], hosts: Sequence[Host], again: str) -> Iterator[Finding]:
    everybody = set(range(len(hosts)))
    lost = {
        host: sorted(everybody - set(each.heard)) if each else sorted(everybody - {host})
        for host, each in enumerate(reached)
        if each is None or everybody - set(each.heard)
    }
    if not lost:
        said = f"each of {len(hosts)} hosts hears every other one through the coordinator on host 0"
        yield Finding(AREA, "coordination", said)
    fix = f"see that every host reaches the port of the coordinator on host 0 ({hosts[0].machine}); then {again}"
    for host, others in lost.items():
        said = f"host {host} has not heard {_named(others)} within {SERVICE_S:g} s"
        yield Finding(AREA, "coordination", said, "error", fix)


def _pairs(reached: Sequence[Reached | None], again: str) -> Iterator[Finding]:
    """What came of each pair, by both of its hosts: the slower time, else why there is none."""
    found: dict[tuple[int, int], float | str] = {}
    for host, each in enumerate(reached):
        for peer, said in each.pairs if each is not None else ():
            pair = (min(host, peer), max(host, peer))
            before = found.get(pair, said)
            found[pair] = max(
                before, said, key=lambda x: (isinstance(x, str), x if isinstance(x, float) else 0.0)
            )
    failed = {pair: said for pair, said in found.items() if isinstance(said, str)}
    every = len(reached) * (len(reached) - 1) // 2
    took = [(seconds, pair) for pair, seconds in found.items() if not isinstance(seconds, str)]
    fix = (
        f"see that these machines reach each other on all ports (a firewall, the wrong network); then {again}"
    )
    for (one, other), said in list(failed.items())[:MOST]:
        why = "their all-reduce has not ended" if said == SILENT else f"their all-reduce failed: {said}"
        yield Finding(AREA, "pairs", f"host {one} and host {other}: {why}", "error", fix)
    if len(failed) > MOST:
        yield Finding(AREA, "pairs", f"and {len(failed) - MOST} more", "error", fix)
    if took:
        seconds, (one, other) = max(took)
        level = "ok" if len(took) == every else "info"
        slowest = f"the slowest, host {one} with host {other}, takes {seconds_text(seconds)} for 4 bytes"
        yield Finding(
            AREA,
            "pairs",
            f"{len(took)} of {every} pair{'s' * (every > 1)}: sums right; measured: {slowest}",
            level,
        )
    elif not failed:
        yield Finding(AREA, "pairs", "not tried, as not all hosts hear each other", "info")


def _all_reduce(reached: Sequence[Reached | None], hosts: Sequence[Host], again: str) -> Iterator[Finding]:
    name, n = "all-reduce", len(hosts)
    said = [each.reduced if each is not None else None for each in reached]
    times = [each for each in said if isinstance(each, tuple)]
    if len(times) == n:
        small, large = (max(each) for each in zip(*times, strict=True))
        rate = rate_text(ring_rate(n, BIG, large))
        took = f"measured: 4 bytes in {seconds_text(small)}, 16 MiB at {rate}"
        yield Finding(AREA, name, f"over {n} hosts, a device each, sums right; {took}{_whose(hosts)}")
    elif failed := [(host, each) for host, each in enumerate(said) if isinstance(each, str)]:
        host, why = failed[0]
        text = f"over {n} hosts: {'it has not ended' if why == SILENT else why} (host {host})"
        yield Finding(AREA, name, text, "error", f"restart the hosts: {again}")
    else:
        yield Finding(AREA, name, "not tried, as not all pairs reach each other", "info")


def _whose(hosts: Sequence[Host]) -> str:
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


def _named(hosts: Mapping[int, str] | Sequence[int]) -> str:
    return " and ".join(f"host {host}" for host in hosts)
