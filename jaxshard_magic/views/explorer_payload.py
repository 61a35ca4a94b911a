"""An explorer as its widget reads it: arrays by shape, the strategy's layout, what the compiler made of a line."""

from typing import TYPE_CHECKING, Any, cast

from jaxshard_magic.config.strategies import EXPLORED
from jaxshard_magic.report import Collective
from jaxshard_magic.report.held import held
from jaxshard_magic.report.sent import PageWidget
from jaxshard_magic.views import device_memory, words
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, dtype_text, printable
from jaxshard_magic.views.leaves_payload import ROLES
from jaxshard_magic.views.packing import compressed, span_pairs

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.explorer.stepped import Compiled, Refused

VERSION = 1


def packed_explorer(ex: "Explorer") -> bytes:
    """The payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(ex))


def live(ex: "Explorer") -> PageWidget:
    """The explorer's widget for a page."""
    return PageWidget("explore", packed_explorer(ex), {**state(ex), "leaf": None, "device": None})


def payload(ex: "Explorer") -> dict[str, Any]:
    """What stays the same of an explorer while it is edited. Names are plain text, never markup."""
    roles = [a.role if a.role in ROLES else "other" for a in ex.arrays]
    order = sorted(range(len(ex.arrays)), key=lambda i: ROLES.index(roles[i]))
    return {
        "v": VERSION,
        "step": ex.stepped is not None,
        "leaves": {
            "path": shown_paths(ex),
            "role": roles,
            "dtype": [printable(dtype_text(a.dtype)) for a in ex.arrays],
            "shape": [list(a.shape) for a in ex.arrays],
            "bits": [a.bits for a in ex.arrays],
            "bytes": [a.bytes for a in ex.arrays],
            "classes": [list(a.classes) for a in ex.arrays],
        },
        "rows": [[roles[i], printable(ex.arrays[i].path), [i]] for i in order],
        "now": ex.held_now,
        "strategies": list(EXPLORED) if ex.stepped is not None else [],
        "line": {
            "home": ex.text_of.home,
            "kept": list(map(printable, ex.text_of.kept)),
            "rules": list(map(printable, ex.text_of.rules)),
        },
        "cell": None if ex.stepped is None else ex.stepped.cell,
    }


def shown_paths(ex: "Explorer") -> list[str]:
    """The paths as the front end writes them."""
    return [printable(a.path) for a in ex.arrays]


def state(ex: "Explorer") -> dict[str, Any]:
    """What changes of it, by the names of the widget's traits."""
    return {
        "axes": [[axis, size] for axis, size in ex.axes.items()],
        "strategy": ex.strategy,
        "wishes": _wishes(ex),
        "laid": laid(ex),
        # numbered, for a browser takes an answer that is the same as before for none
        "compiled": None if ex.compiled is None else {**compiled(ex.compiled), "answer": ex.answers},
    }


def laid(ex: "Explorer") -> dict[str, Any]:
    """How the strategy lays the arrays out on the mesh that was asked for, or why that can't be told."""
    whys: dict[str, int] = {}
    found = ex.laid
    return {
        "strategy": ex.strategy,
        "mesh": [[axis, size] for axis, size in ex.axes.items()],
        "devices": list(ex.mesh_info.devices),
        "cuts": [[list(axes) for axes in cut] for cut in found.cuts],
        "why": [whys.setdefault(printable(why), len(whys)) for why in found.whys],
        "whys": list(whys),
        "settled": _settled(ex),
        "given": [i for i, why in enumerate(found.whys) if why.startswith("given ")],
        "note": printable(ex.note),
        "count": ex.place.count,
        "made_of": ex.place.made_of,
    }


def _settled(ex: "Explorer") -> dict[str, Any] | None:
    """The layout with what is set by hand, and what that was."""
    if ex.settled is None:
        return None
    cuts = [[list(axes) for axes in cut] for cut in ex.settled.cuts]
    return {"wishes": _wishes(ex), "cuts": cuts}


def _wishes(ex: "Explorer") -> dict[str, list[list[str]]]:
    return {printable(path): [list(axes) for axes in cut] for path, cut in ex.wishes.items()}


def compiled(trial: "Compiled | Refused") -> dict[str, Any]:
    """A line's figures on the fullest device, as they were predicted and as they are; or why it has none."""
    why = getattr(trial, "why", None)
    empty = {"line": printable(trial.line), "error": None, "axes": [], "verdict": [], "rows": []}
    if why is not None:
        return {**empty, "error": printable(why)}
    trial = cast("Compiled", trial)
    return {
        **empty,
        "axes": [printable(axis) for axis in trial.report.mesh.axes],
        "verdict": span_pairs(words.verdict(trial.report).spans),
        "rows": [*_memory_rows(trial), *_sent_rows(trial)],
    }


def _memory_rows(compiled: "Compiled") -> list[list[Any]]:
    predicted, top = compiled.predicted, device_memory.fullest(compiled.report.memory)
    arrays = held(compiled.report.leaves)  # those that go in, as the explorer counts them
    return [
        ["arrays", None, byte_text(predicted and predicted.arrays), byte_text(arrays)],
        ["at the peak", None, byte_text(predicted and predicted.peak), byte_text(top and top.peak)],
    ]


def _sent_rows(compiled: "Compiled") -> list[list[Any]]:
    """All that is sent, then by kind of collective and axes: how many, and bytes."""
    predicted = None if compiled.predicted is None else compiled.predicted.collectives
    read = compiled.report.collectives
    rows: list[list[Any]] = [["sent in a step", None, _sent(predicted), _sent(read)]]
    keys = dict.fromkeys((c.kind, c.axes) for c in (*(read or ()), *(predicted or ())))
    for kind, axes in keys:
        alike = [
            None if some is None else [c for c in some if (c.kind, c.axes) == (kind, axes)]
            for some in (predicted, read)
        ]
        over = None if axes is None else [printable(axis) for axis in axes]
        rows.append(
            [f"{printable(kind)}s over" if over else f"other {printable(kind)}s", over, *map(_counted, alike)]
        )
    return rows


def _sent(collectives: "tuple[Collective, ...] | None") -> str:
    return UNKNOWN if collectives is None else words.sent_text(collectives) if collectives else "nothing"


def _counted(collectives: list[Collective] | None) -> str:
    if not collectives:
        return UNKNOWN if collectives is None else "none"
    return f"{words.sent_text(collectives)} in {count_text(sum(c.count for c in collectives))}"
