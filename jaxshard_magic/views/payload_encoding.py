"""Encoding shared by the payloads of all widgets."""

import json
import zlib
from collections.abc import Iterable
from typing import Any

from jaxshard_magic.report import Report
from jaxshard_magic.report.parts import dim_axes
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.words import Span


def compressed(payload: Any, level: int = 6) -> bytes:
    """Return `payload` as compact JSON in UTF-8, compressed with zlib.

    Args:
        payload: Data for JSON; scalars of NumPy are accepted.
        level: Level of zlib.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    separators = (",", ":")
    text = json.dumps(
        payload,
        ensure_ascii=False,
        separators=separators,
        allow_nan=False,  # `JSON.parse` in a browser refuses NaN and Infinity
        default=lambda n: n.item(),  # scalars of NumPy become numbers of Python
    )
    return zlib.compress(text.encode(), level)


def span_pairs(spans: Iterable[Span]) -> list[list[str]]:
    """Return `[text, kind]` of each nonempty span."""
    return [[printable(span.text), span.kind] for span in spans if span.text]


def axis_numbers(axes: Iterable[str], reports: Iterable[Report]) -> dict[str, int]:
    """Number mesh axes from 0: first the mesh's own, then axes named only by leaves, collectives or waits.

    Args:
        axes: Axes of the mesh.
        reports: Reports to search for further axes.
    """
    names = dict.fromkeys(axes)
    for report in reports:
        for leaf in report.leaves:
            for cut in dim_axes(leaf.spec, len(leaf.spec)):
                names.update(dict.fromkeys(cut))
            names.update(dict.fromkeys((*leaf.within, *leaf.wanted)))
        for c in report.collectives or ():
            names.update(dict.fromkeys(c.axes or ()))
        for wait in report.timing.waits if report.timing else ():
            names.update(dict.fromkeys(wait.axes))
    return {axis: i for i, axis in enumerate(names)}
