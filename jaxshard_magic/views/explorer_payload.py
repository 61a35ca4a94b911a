"""Data of an explorer for its widget: arrays by shape, the strategy's layout, and results of compiled lines."""

from typing import TYPE_CHECKING, Any, cast

from jaxshard_magic.config.strategies import EXPLORED
from jaxshard_magic.report import Collective
from jaxshard_magic.report.device_leaves import stored_bytes
from jaxshard_magic.views import device_memory, words
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, dtype_text, printable
from jaxshard_magic.views.leaf_rows import ROLES
from jaxshard_magic.views.payload_encoding import compressed, span_pairs

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.explorer.explored_step import CompiledLine, RefusedLine

VERSION = 1


def packed_explorer(ex: "Explorer") -> bytes:
    """Return the payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(ex))


def payload(ex: "Explorer") -> dict[str, Any]:
    """Return the data that stays constant while the explorer is edited.

    Names are plain text, never markup.
    """
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
            "home": ex.text_of.default_mesh,
            "kept": list(map(printable, ex.text_of.other_options)),
            "rules": list(map(printable, ex.text_of.rules)),
        },
        "cell": None if ex.stepped is None else ex.stepped.cell,
    }


def shown_paths(ex: "Explorer") -> list[str]:
    """Return the paths of all arrays as displayed in the browser."""
    return [printable(a.path) for a in ex.arrays]


def state(ex: "Explorer") -> dict[str, Any]:
    """Return the data that changes, keyed by the widget's trait names."""
    return {
        "axes": [[axis, size] for axis, size in ex.axes.items()],
        "strategy": ex.strategy,
        "wishes": _wishes(ex),
        "laid": layout_payload(ex),
        # Numbered, because a browser ignores a new value that equals the old one.
        "compiled": None if ex.compiled is None else {**compiled(ex.compiled), "answer": ex.answers},
    }


def layout_payload(ex: "Explorer") -> dict[str, Any]:
    """Return the strategy's layout of the arrays on the requested mesh, or the reason for having none."""
    whys: dict[str, int] = {}
    layout = ex.laid
    return {
        "strategy": ex.strategy,
        "mesh": [[axis, size] for axis, size in ex.axes.items()],
        "devices": list(ex.mesh_info.devices),
        "cuts": [[list(axes) for axes in cut] for cut in layout.cuts],
        "why": [whys.setdefault(printable(why), len(whys)) for why in layout.reasons],
        "whys": list(whys),
        "settled": _override_payload(ex),
        "given": [i for i, why in enumerate(layout.reasons) if why.startswith("given ")],
        "note": printable(ex.note),
        "count": ex.place.count,
        "made_of": ex.place.made_of,
    }


def _override_payload(ex: "Explorer") -> dict[str, Any] | None:
    """Return the layout with the specs set by hand, together with those specs; None without such a layout."""
    if ex.settled is None:
        return None
    cuts = [[list(axes) for axes in cut] for cut in ex.settled.cuts]
    return {"wishes": _wishes(ex), "cuts": cuts}


def _wishes(ex: "Explorer") -> dict[str, list[list[str]]]:
    return {printable(path): [list(axes) for axes in cut] for path, cut in ex.wishes.items()}


def compiled(trial: "CompiledLine | RefusedLine") -> dict[str, Any]:
    """Return the predicted and compiled figures of a line on the fullest device, or the error."""
    # Only refused lines have `why`; their classes are imported for type checking alone.
    why = getattr(trial, "why", None)
    empty = {"line": printable(trial.line), "error": None, "axes": [], "verdict": [], "rows": []}
    if why is not None:
        return {**empty, "error": printable(why)}
    trial = cast("CompiledLine", trial)
    return {
        **empty,
        "axes": [printable(axis) for axis in trial.report.mesh.axes],
        "verdict": span_pairs(words.verdict(trial.report).spans),
        "rows": [*_memory_rows(trial), *_sent_rows(trial)],
    }


def _memory_rows(compiled: "CompiledLine") -> list[list[Any]]:
    predicted, top = compiled.predicted, device_memory.fullest(compiled.report.memory)
    arrays = stored_bytes(compiled.report.leaves)  # arguments alone, as in the prediction
    return [
        ["arrays", None, byte_text(predicted and predicted.arrays), byte_text(arrays)],
        ["at the peak", None, byte_text(predicted and predicted.peak), byte_text(top and top.peak)],
    ]


def _sent_rows(compiled: "CompiledLine") -> list[list[Any]]:
    """Return rows of communication: everything sent, then count and bytes by kind of collective and axes."""
    predicted = None if compiled.predicted is None else compiled.predicted.collectives
    read = compiled.report.collectives
    rows: list[list[Any]] = [["sent in a step", None, _sent_text(predicted), _sent_text(read)]]
    keys = dict.fromkeys((c.kind, c.axes) for c in (*(read or ()), *(predicted or ())))
    for kind, axes in keys:
        matching = [
            None if some is None else [c for c in some if (c.kind, c.axes) == (kind, axes)]
            for some in (predicted, read)
        ]
        over = None if axes is None else [printable(axis) for axis in axes]
        rows.append(
            [f"{printable(kind)}s over" if over else f"other {printable(kind)}s", over, *map(_count_text, matching)]
        )
    return rows


def _sent_text(collectives: "tuple[Collective, ...] | None") -> str:
    return UNKNOWN if collectives is None else words.sent_text(collectives) if collectives else "nothing"


def _count_text(collectives: list[Collective] | None) -> str:
    if not collectives:
        return UNKNOWN if collectives is None else "none"
    return f"{words.sent_text(collectives)} in {count_text(sum(c.count for c in collectives))}"
