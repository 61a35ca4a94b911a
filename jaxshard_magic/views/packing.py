"""What the payloads of all widgets are written with."""

import json
import zlib
from collections.abc import Iterable
from typing import Any

from jaxshard_magic.report import Report
from jaxshard_magic.report.parts import cut_of
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.words import Span


def compressed(payload: Any, level: int = 6) -> bytes:
    """`payload` as compact JSON in UTF-8, compressed with zlib at `level`; numbers of other libraries are taken."""
    separators = (",", ":")
    text = json.dumps(
        payload, ensure_ascii=False, separators=separators, allow_nan=False, default=lambda n: n.item()
    )
    return zlib.compress(text.encode(), level)


def span_pairs(spans: Iterable[Span]) -> list[list[str]]:
    """`[text, kind]` of each span that is not empty."""
    return [[printable(span.text), span.kind] for span in spans if span.text]


def axis_numbers(axes: Iterable[str], reports: Iterable[Report]) -> dict[str, int]:
    """Numbers from 0 on of a mesh's `axes`, then of what only leaves, collectives or waits of `reports` name."""
    names = dict.fromkeys(axes)
    for report in reports:
        for leaf in report.leaves:
            for cut in cut_of(leaf.spec, len(leaf.spec)):
                names.update(dict.fromkeys(cut))
            names.update(dict.fromkeys((*leaf.within, *leaf.wanted)))
        for c in report.collectives or ():
            names.update(dict.fromkeys(c.axes or ()))
        for wait in report.timing.waits if report.timing else ():
            names.update(dict.fromkeys(wait.axes))
    return {axis: i for i, axis in enumerate(names)}
