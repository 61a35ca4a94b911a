"""The look that all figures share: type, ground, title, legend and axes."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
TOP, BOTTOM, SIDE, LINE = 32, 32, 16, 17  # px
LEGEND = 52  # px
LETTERS = 110  # that a line of the title has room for
CLEAR = "rgba(0,0,0,0)"


def frame(head: str, rest: str, of: str | None, bars: int, colours: Mapping[str, str]) -> dict[str, Any]:
    """The layout of a figure whose horizontal bars take `bars` px: the title's `head` in bold and the `rest` of it,
    and `of`, what the legend's figures are of; without that there is no legend."""
    title = [f"<b>{head}</b>{rest}"]
    if len(head + rest) > LETTERS:
        title = [f"<b>{head}</b>", *wrap(rest.strip(), LETTERS)]
    more = LINE * (len(title) - 1)
    lines = TOP + more
    top = lines + LEGEND * (of is not None)
    height = top + bars + BOTTOM
    return {
        "template": "none",
        "barmode": "stack",
        "bargap": 0.3,
        "height": height,
        "margin": {"l": SIDE, "r": SIDE, "t": top, "b": BOTTOM},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": colours["ink"]},
        "title": {
            "text": "<br>".join(title),
            "font": {"size": 13},
            "x": 0,
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 8 + more / 2, "l": SIDE},  # plotly centres the lines around the first one's place
        },
        "showlegend": of is not None,
        "legend": {
            "title": {"text": of, "font": {"size": 12, "color": colours["ink-2"]}},
            "orientation": "h",
            "traceorder": "normal",
            "bgcolor": CLEAR,
            "xref": "container",
            "x": 0.01,
            "yref": "container",
            "y": 1 - lines / height,
            "yanchor": "top",
        },
        "hoverlabel": {"bgcolor": colours["bg"], "bordercolor": colours["line"], "font": {"family": FONT}},
    }


def labels(texts: Sequence[str]) -> dict[str, Any]:
    """The y axis of bars that are told by `texts`, the first on top."""
    return {
        "autorange": "reversed",
        "tickvals": list(range(len(texts))),
        "ticktext": list(texts),
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": CLEAR,
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
    }


def scale(
    end: float, ticks: Sequence[float], texts: Sequence[str], colours: Mapping[str, str]
) -> dict[str, Any]:
    """The x axis from 0 to `end`, with hairlines at `ticks`."""
    return {
        "range": [0, end],
        "tickvals": list(ticks),
        "ticktext": list(texts),
        "gridcolor": colours["line"],
        "zeroline": False,
        "ticks": "",
        "tickfont": {"color": colours["ink-2"]},
    }
