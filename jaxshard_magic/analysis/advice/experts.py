"""Advice on sharded experts, from the rows of each expert on the first batch."""

from collections.abc import Iterator, Sequence

from ...code_locations import location_text
from ...report import Advice, ExpertLoad
from ...units import share_text as share
from .case import Case, devices_along

DROPPED = 0.01  # share of the tokens' choices; a larger dropped share is a warning
IDLE = 0.2  # share of the experts' time; a longer wait is worth advice, twice as long a warning
EMPTY = 0.5  # share of the capacity


def dropped(case: Case) -> Iterator[Advice]:
    """Advise on tokens dropped because their expert had no slot left."""
    for experts in case.experts:
        layers = [load for load in experts.layers if load.dropped]
        load = max(layers, key=_dropped_share, default=None)
        if load is None or not load.places or load.most is None:
            continue
        # `places` is the capacity over all groups of tokens.
        each, lost = load.places // load.groups, _dropped_share(load)
        others = f"the worst of {len(layers)} layers that drop some" if len(layers) > 1 else ""
        message = (
            f"{load.dropped:,} of {sum(load.chosen or ()):,} rows ({share(lost)}) found no place with their expert on "
            f"the first batch, and are dropped{_where(load, others)}: an expert has {each:,} places{_a_group(load)}; "
            f"{load.most:,} would have kept all, for {load.most / each:.2f} times the products of the experts."
        )
        yield Advice("experts-dropped", "warning" if lost >= DROPPED else "info", message)


def empty_places(case: Case) -> Iterator[Advice]:
    """Advise on slots that mostly contain no token, though fewer slots would have been enough."""
    for experts in case.experts:
        counted = [load for load in experts.layers if load.empty is not None]
        if not counted or any(load.dropped for load in counted):
            continue
        most = max(load.most or 0 for load in counted)
        load = min(counted, key=lambda load: load.empty or 0.0)
        each = (load.places or 0) // load.groups
        if (load.empty or 0.0) < EMPTY or not 0 < most < each:
            continue
        message = (
            f"{share(load.empty or 0.0)} of the places of experts held no token on the first batch{_where(load)}, and "
            f"are multiplied as zeros: {most:,} places{_a_group(load)}, where there are {each:,}, would have kept all "
            f"its tokens, for {share(most / each)} of the products of the experts."
        )
        yield Advice("experts-empty", "info", message)


def uneven(case: Case) -> Iterator[Advice]:
    """Advise on a device with many more expert rows than others, which wait for it."""
    for experts in case.experts:
        n = devices_along(case.mesh.axes, experts.axes)
        layers = [load for load in experts.layers if load.chosen and sum(load.chosen)]
        # Otherwise each expert multiplies its full capacity, or all tokens: equal work on all devices.
        if experts.work != "sorted" or not layers or n < 2:
            continue
        load = max(layers, key=lambda load: _idle(load, n))
        idle, rows = _idle(load, n), _by_device(load, n)
        if idle < IDLE:
            continue
        busiest, size = rows.index(max(rows)), experts.number // n
        own = f"experts {busiest * size} to {(busiest + 1) * size - 1}" if size > 1 else f"expert {busiest}"
        message = (
            f"Experts are chosen unevenly on the first batch{_where(load)}: a device with {own} multiplies "
            f"{max(rows) * n / sum(rows):.2f} times the mean of {sum(rows) / n:,.0f} rows, so that devices "
            f"are idle {share(idle)} of the time that experts take. A loss that evens out what the router chooses "
            "shortens that."
        )
        yield Advice("experts-uneven", "warning" if idle >= 2 * IDLE else "info", message)


def _dropped_share(load: ExpertLoad) -> float:
    return (load.dropped or 0) / (sum(load.chosen or ()) or 1)


def _by_device(load: ExpertLoad, n: int) -> Sequence[int]:
    chosen = load.chosen or ()
    size = len(chosen) // n
    return [sum(chosen[d * size : (d + 1) * size]) for d in range(n)]


def _idle(load: ExpertLoad, n: int) -> float:
    rows = _by_device(load, n)
    return 1 - sum(rows) / (n * max(rows)) if max(rows) else 0.0


def _a_group(load: ExpertLoad) -> str:
    return f" in each of {load.groups:,} groups" if load.groups > 1 else ""


def _where(load: ExpertLoad, more: str = "") -> str:
    at = "" if load.line is None else location_text(load.file, load.line)
    words = "; ".join(filter(None, (at, more)))
    return f" ({words})" if words else ""
