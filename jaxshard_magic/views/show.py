"""How a notebook shows a report, a comparison or a pipeline: as a widget with its HTML twin, as HTML, or as text.

The twin is a second output. The live widget hides it; where no widget runs (a reopened notebook, nbconvert,
GitHub) it is what a reader sees.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.sent import Sendable
from jaxshard_magic.report.written import Shown, Written
from jaxshard_magic.views import html, interactive
from jaxshard_magic.views.terminal import writable
from jaxshard_magic.views.timeline import html as timeline
from jaxshard_magic.views.training.payload import packed_training

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.report.choice import Choice
    from jaxshard_magic.views.live_view import LiveView
    from jaxshard_magic.views.training.widget import TrainingView

VARIABLE = "JAXSHARD_VIEW"
WAYS = ("auto", "widget", "html", "page", "data", "text")
DATA = "application/vnd.jaxshard_magic.data+json"  # what another kernel makes the same of: its class, and its JSON
WAIT = 0.4  # seconds


def show(report: Report, how: str | None = None) -> None:
    """Display `report`, or raise NotImplementedError where IPython's own formatters show it as is wanted.

    Args:
        how: auto: in a notebook the widget with its twin, in a terminal text; widget: the widget alone; html, without
            any widget; page: as html, and what a page that is made of the saved notebook needs to show the widget;
            data: the report itself, for the kernel that shows it; text. By default what the variable JAXSHARD_VIEW
            says, else auto.
    """
    how = _wanted(how)
    if how == "html" or not _in_notebook(get_ipython()):
        raise NotImplementedError("text in a terminal, text and HTML in a notebook")
    if how == "text":
        display({"text/plain": report.to_text()}, raw=True)
    elif how == "page":
        display(_page(report, report.to_html()), raw=True)
    elif how == "data":
        display(_data(report), raw=True)
    else:
        _show_widget(report, alone=how == "widget")


def show_now(shown: Shown) -> None:
    """Display what shows itself, at once; print it as text where there is no IPython."""
    if get_ipython() is None:
        print(writable(shown.to_text()))
    else:
        display(shown)


def show_pipeline(pipeline: Pipeline, how: str | None = None) -> None:
    """Display `pipeline`, or print it where there is no notebook.

    Args:
        how: as for `show`.
    """

    def view() -> "LiveView":
        from jaxshard_magic.views.timeline.widget import PipelineView

        return PipelineView(pipeline)

    _show_or_print(_wanted(how), pipeline, lambda also: timeline.to_html(pipeline, also), view)


def show_choice(choice: "Choice", report: Report | None, how: str | None = None) -> None:
    """Display what a search chose and, below its widget, the report of the choice; or print it without a notebook.

    Args:
        report: None where nothing was compiled.
        how: as for `show`.
    """
    show_live(choice, how)
    if report is not None and _in_notebook(get_ipython()) and _wanted(how) in ("auto", "widget", "data"):
        display(report)


def show_live(shown: "Comparison | Choice | Explorer", how: str | None = None) -> None:
    """Display a comparison, a choice or an explorer, or print it where there is no notebook.

    Args:
        how: as for `show`.
    """

    def static(also: str) -> str:
        return f'<div class="{also}">\n{shown.to_html()}</div>\n' if also else shown.to_html()

    _show_or_print(_wanted(how), shown, static, lambda: _open_view(shown))


def _show_or_print(
    how: str, shown: Sendable, static: Callable[[str], str], make: "Callable[[], LiveView]"
) -> None:
    """`static(also)` is the HTML, of the class `also` as well."""
    text = shown.to_text()
    if not _in_notebook(get_ipython()):
        print(writable(text))
    elif how == "text":
        display({"text/plain": text}, raw=True)
    elif how == "page":
        display(_page(shown, static("")), raw=True)
    elif how == "data" and isinstance(shown, Written):
        display(_data(shown), raw=True)
    else:
        view = None if how == "html" else _made(make)
        if view is None:
            display({"text/plain": text, "text/html": static("")}, raw=True)
        else:
            _display(view, text, static(view.static_class), alone=how == "widget")


def _data(shown: Written) -> dict[str, Any]:
    return {"text/plain": shown.to_text(), DATA: {"kind": type(shown).__name__, "data": shown.to_dict()}}


def _page(shown: Sendable, static: str) -> dict[str, Any]:
    """What a saved notebook keeps: text, HTML without script, and the widgets as data."""
    views = interactive.views_of(shown._live())
    return {"text/plain": shown.to_text(), "text/html": static, interactive.MIME: {"views": views}}


class Growing:
    """An output of a cell that trains: the widget, told what is new, and its twin, which now and then gets all there
    is, so that a notebook whose kernel has died keeps the last of it.

    Args:
        update: all there is, as `training.payload.update` has it.
        text, static: the same for a reader without widgets.
        how: as for `show`.
    """

    def __init__(self, update: dict[str, Any], text: str, static: str, how: str | None = None):
        self._view: TrainingView | None = None
        if _wanted(how) in ("auto", "widget"):
            with suppress(ImportError):  # then it is HTML alone
                self._view = import_module("jaxshard_magic.views.training.widget").TrainingView(
                    packed_training(update)
                )
        if self._view is not None:
            bundle, metadata = self._view._repr_mimebundle_() or ({}, {})
            display(bundle | {"text/plain": ""}, metadata=metadata, raw=True)
        self._twin = display(self._told(text, static), raw=True, display_id=True)

    def tell(self, update: dict[str, Any]) -> None:
        """Draw what is new."""
        if self._view is not None:
            self._view.tell(update)

    def keep(self, update: dict[str, Any], text: str, static: str) -> None:
        """Draw all there is, and keep it."""
        if self._view is not None:
            self._view.keep(packed_training(update))
        if self._twin is not None:
            self._twin.update(self._told(text, static), raw=True)

    def _told(self, text: str, static: str) -> dict[str, str]:
        if self._view is not None:
            static = (
                f'<div class="jss {self._view.static_class}">\n{static}</div>\n{_in_place_of(self._view)}'
            )
        return {"text/plain": text, "text/html": static}


def shows_growing(how: str | None = None) -> bool:
    """Whether there is a notebook that shows how a training goes."""
    return _in_notebook(get_ipython()) and _wanted(how) in ("auto", "widget", "html", "page")


def show_stop(how: str | None = None) -> Callable[[], None]:
    """Display a button that interrupts the cell, or a line that says that it can be; what is returned takes it away.

    Args:
        how: as for `show`.
    """
    view = None
    if _wanted(how) in ("auto", "widget"):
        with suppress(ImportError):  # then the line says it
            view = import_module("jaxshard_magic.views.stop_button").StopButton()
    said = "Interrupt the kernel to stop: what is done is kept."
    bundle, metadata = (None if view is None else view._repr_mimebundle_()) or ({}, {})
    handle = display(bundle | {"text/plain": said}, metadata=metadata, raw=True, display_id=True)

    def remove() -> None:
        if handle is not None:
            handle.update({"text/plain": "", "text/html": ""}, raw=True)
        if view is not None:
            view.close()

    return remove


def _wanted(how: str | None) -> str:
    how = how or os.environ.get(VARIABLE) or "auto"
    if how not in WAYS:
        raise ShardError(none_of(f"no view {how!r}", how, WAYS, f"the views are {one_of(WAYS)}"))
    return how


def _made(make: "Callable[[], LiveView]") -> "LiveView | None":
    """A new widget; where there can be none a line says so."""
    try:
        return make()
    except ImportError as error:
        print(_no_widgets(error))
        return None


def _no_widgets(error: ImportError) -> str:
    return f"no widgets here, so this is HTML: {' '.join(str(error).split())}"


def make_ready(how: str) -> None:
    """Import what `show` will need, in a thread of its own: a report then follows its run without a wait."""
    if how in ("auto", "widget") and _in_notebook(get_ipython()):
        Thread(target=_import_widgets, name="jaxshard widgets", daemon=True).start()


def _import_widgets() -> None:
    with suppress(ImportError):  # `show` says so
        import_module("jaxshard_magic.views.widget")


def _in_notebook(shell: Any) -> bool:
    """Whether there is a kernel, whose front end may show more than text."""
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and list(shell.display_formatter.active_types) != ["text/plain"]


def _show_widget(report: Report, *, alone: bool) -> None:
    try:
        view = _open_view(report)
    except ImportError as error:
        print(_no_widgets(error))
        raise NotImplementedError("HTML") from None
    _display(view, report.to_text(), html.fragment(report, view.static_class), alone=alone)


def _display(view: "LiveView", text: str, static: str, *, alone: bool) -> None:
    """The widget, and after it its twin unless it stands alone."""
    bundle, metadata = view._repr_mimebundle_() or ({}, {})
    if alone:
        display(bundle | {"text/plain": text}, metadata=metadata, raw=True)
        return
    display(bundle | {"text/plain": ""}, metadata=metadata, raw=True)
    display({"text/plain": text, "text/html": static + _in_place_of(view)}, raw=True)


def _in_place_of(view: "LiveView") -> str:
    """For JupyterLab and Notebook, which write "model not found" above the twin in a reopened notebook: a style against
    it. It also keeps room instead of the twin until the widget's model, which does so from then on, is there."""
    above = f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{view.static_class})"
    return (
        f"<style>{above} > .jupyter-widgets:not(:has(*)){{display:none}}"
        f".jp-NotebookPanel .{view.static_class}{{animation:jsm-wait {WAIT}s}}"
        "@keyframes jsm-wait{0%,100%{visibility:hidden;max-height:640px;overflow:hidden}}</style>\n"
    )


def _open_view(shown: "Report | Comparison | Choice | Explorer") -> "LiveView":
    """The view of one of them, a new one where the old one was closed."""
    if shown.view.comm is None:
        vars(shown).pop("view")
    return shown.view
