"""Charts to zoom, restyle and save, as plotly figures in the report's look."""

from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.report import Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.colours import THEMES
from jaxshard_magic.views.figures.memory import memory
from jaxshard_magic.views.figures.roofline import roofline
from jaxshard_magic.views.figures.scatter import scatter
from jaxshard_magic.views.figures.timeline import timeline

_FIGURES: dict[str, Callable[[Report, Mapping[str, str]], go.Figure]] = {
    "memory": memory,
    "roofline": roofline,
    "timeline": timeline,
}


def figure(report: Report, name: str, theme: str = "light") -> go.Figure:
    """The figure `name` of `report`, "memory", "roofline" or "timeline", on a "light" or "dark" ground.

    Raises ShardError for other names, and for a report without that part.
    """
    if name not in _FIGURES:
        raise ShardError(
            none_of(f"no figure {name!r}", str(name), _FIGURES, f"the figures are {one_of(_FIGURES)}")
        )
    return _FIGURES[name](report, _colours(theme))


def comparison(compared: Comparison, theme: str = "light") -> go.Figure:
    """Peak memory against step time of a comparison, on a "light" or "dark" ground.

    Raises ShardError where no trial has both.
    """
    return scatter(compared, _colours(theme))


def _colours(theme: str) -> Mapping[str, str]:
    if theme not in THEMES:
        raise ShardError(
            none_of(f"no theme {theme!r}", str(theme), THEMES, f"the themes are {one_of(THEMES)}")
        )
    return THEMES[theme]
