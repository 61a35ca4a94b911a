"""Display reports, comparisons and pipelines in a notebook: as a widget with its static twin, as HTML, or as text.

The twin is a second output with HTML. A live widget hides its twin. Without widgets (a reopened notebook, nbconvert,
GitHub) a reader sees the twin alone.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from jaxshard_magic.display import writable
from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.report.records import Displayable, JsonRecord
from jaxshard_magic.views import html, widget_page
from jaxshard_magic.views.training.payload import packed_training

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.report.choice import Choice
    from jaxshard_magic.views.live_view import LiveView
    from jaxshard_magic.views.widget import TrainingView

VARIABLE = "JAXSHARD_VIEW"
VIEW_MODES = ("auto", "widget", "html", "page", "data", "text")
DATA = "application/vnd.jaxshard_magic.data+json"  # MIME type of an object for another kernel: class, JSON
# A widget's model arrives after its output; until then the twin is hidden, but its space is reserved.
WAIT = 0.4  # seconds


def show(report: Report, how: str | None = None) -> None:
    """Display a report.

    Args:
        report: Report to display.
        how: One of the views; None reads the variable JAXSHARD_VIEW, else takes "auto".
            - "auto": in a notebook the widget with its twin, in a terminal text.
            - "widget": the widget alone.
            - "html": HTML without a widget.
            - "page": HTML, and data from which a page made of the saved notebook can show the widget.
            - "data": the report itself, for another kernel to show.
            - "text": text.

    Raises:
        NotImplementedError: IPython's own formatters already show the report as requested.
        ShardError: `how` is none of the views.
    """
    how = _view_mode(how)
    if how == "html" or not _in_notebook(get_ipython()):
        # A formatter that raises NotImplementedError is skipped by IPython, and the other formatters apply.
        raise NotImplementedError("text in a terminal, text and HTML in a notebook")
    if how == "text":
        display({"text/plain": report.to_text()}, raw=True)
    elif how == "page":
        display(_page(report, report.to_html()), raw=True)
    elif how == "data":
        display(_data(report), raw=True)
    else:
        _show_widget(report, alone=how == "widget")


def show_now(shown: Displayable) -> None:
    """Display an object at once; print its text outside of IPython."""
    if get_ipython() is None:
        print(writable(shown.to_text()))
    else:
        display(shown)


def show_pipeline(pipeline: Pipeline, how: str | None = None) -> None:
    """Display a pipeline, or print it outside of a notebook.

    Args:
        pipeline: Pipeline to display.
        how: As for `show`.
    """

    def view() -> "LiveView":
        from jaxshard_magic.views.widget import PipelineView

        return PipelineView(pipeline)

    _show_or_print(_view_mode(how), pipeline, lambda also: html.of_pipeline(pipeline, also), view)


def show_choice(choice: "Choice", report: Report | None, how: str | None = None) -> None:
    """Display the result of a search and, below its widget, the report of the choice.

    Outside of a notebook only the result of the search is printed.

    Args:
        choice: Result of a search.
        report: Report of the choice; None if nothing was compiled.
        how: As for `show`.
    """
    show_live(choice, how)
    if report is not None and _in_notebook(get_ipython()) and _view_mode(how) in ("auto", "widget", "data"):
        display(report)


def show_live(shown: "Comparison | Choice | Explorer", how: str | None = None) -> None:
    """Display a comparison, a choice or an explorer, or print it outside of a notebook.

    Args:
        shown: Object to display.
        how: As for `show`.
    """

    def static(also: str) -> str:
        return f'<div class="{also}">\n{shown.to_html()}</div>\n' if also else shown.to_html()

    _show_or_print(_view_mode(how), shown, static, lambda: _open_view(shown))


def _show_or_print(how: str, shown: Exportable, static: Callable[[str], str], make: "Callable[[], LiveView]") -> None:
    """Display an object in one of the views, or print it outside of a notebook.

    Args:
        how: Name of the view.
        shown: Object to display.
        static: Returns the HTML, given a further class of its `<div>`.
        make: Returns the widget.
    """
    text = shown.to_text()
    if not _in_notebook(get_ipython()):
        print(writable(text))
    elif how == "text":
        display({"text/plain": text}, raw=True)
    elif how == "page":
        display(_page(shown, static("")), raw=True)
    elif how == "data" and isinstance(shown, JsonRecord):
        display(_data(shown), raw=True)
    else:
        view = None if how == "html" else _new_view(make)
        if view is None:
            display({"text/plain": text, "text/html": static("")}, raw=True)
        else:
            _display(view, text, static(view.static_class), alone=how == "widget")


def _data(shown: JsonRecord) -> dict[str, Any]:
    """Return the MIME bundle of an object for another kernel: its class, and its JSON."""
    return {"text/plain": shown.to_text(), DATA: {"kind": type(shown).__name__, "data": shown.to_dict()}}


def _page(shown: Exportable, static: str) -> dict[str, Any]:
    """Return the MIME bundle of a saved notebook: text, HTML without script, and the widgets as data."""
    views = widget_page.widgets_as_data(shown._page_widgets())
    return {"text/plain": shown.to_text(), "text/html": static, widget_page.MIME: {"views": views}}


class Growing:
    """Output of a training cell: a widget that receives news, and a twin that now and then receives everything.

    The twin keeps the latest state in a notebook whose kernel has died.

    Args:
        update: Complete state, as returned by `training.payload.update_payload`.
        text: The same as text for readers without widgets.
        static: The same as HTML.
        how: As for `show`.
    """

    def __init__(self, update: dict[str, Any], text: str, static: str, how: str | None = None):
        self._view: TrainingView | None = None
        if _view_mode(how) in ("auto", "widget"):
            with suppress(ImportError):  # without widgets the HTML is shown alone
                self._view = import_module("jaxshard_magic.views.widget").TrainingView(packed_training(update))
        if self._view is not None:
            bundle, metadata = self._view._repr_mimebundle_() or ({}, {})
            # The twin has the text already.
            display(bundle | {"text/plain": ""}, metadata=metadata, raw=True)
        self._twin = display(self._told(text, static), raw=True, display_id=True)

    def tell(self, update: dict[str, Any]) -> None:
        """Draw new data in the widget."""
        if self._view is not None:
            self._view.send_update(update)

    def keep(self, update: dict[str, Any], text: str, static: str) -> None:
        """Draw the complete state in widget and twin, and store it in the notebook.

        Args:
            update: Complete state.
            text: The same as text.
            static: The same as HTML.
        """
        if self._view is not None:
            self._view.replace_data(packed_training(update))
        if self._twin is not None:
            self._twin.update(self._told(text, static), raw=True)

    def _told(self, text: str, static: str) -> dict[str, str]:
        if self._view is not None:
            static = f'<div class="jss {self._view.static_class}">\n{static}</div>\n{_twin_style(self._view)}'
        return {"text/plain": text, "text/html": static}


def shows_growing(how: str | None = None) -> bool:
    """Return whether this notebook displays the progress of a training."""
    return _in_notebook(get_ipython()) and _view_mode(how) in ("auto", "widget", "html", "page")


def show_stop_button(how: str | None = None) -> Callable[[], None]:
    """Display a button that interrupts the cell, or a line about interrupting the kernel.

    Args:
        how: As for `show`.

    Returns:
        Function that removes the output.
    """
    view = None
    if _view_mode(how) in ("auto", "widget"):
        with suppress(ImportError):  # without widgets the text says how to interrupt
            view = import_module("jaxshard_magic.views.widget").StopButton()
    message = "Interrupt the kernel to stop: what is done is kept."
    bundle, metadata = (None if view is None else view._repr_mimebundle_()) or ({}, {})
    handle = display(bundle | {"text/plain": message}, metadata=metadata, raw=True, display_id=True)

    def remove() -> None:
        if handle is not None:
            handle.update({"text/plain": "", "text/html": ""}, raw=True)
        if view is not None:
            view.close()

    return remove


def _view_mode(how: str | None) -> str:
    """Return the name of the requested view.

    Raises:
        ShardError: There is no such view.
    """
    how = how or os.environ.get(VARIABLE) or "auto"
    if how not in VIEW_MODES:
        raise ShardError(unknown_name(f"no view {how!r}", how, VIEW_MODES, f"the views are {list_names(VIEW_MODES)}"))
    return how


def _new_view(make: "Callable[[], LiveView]") -> "LiveView | None":
    """Return a new widget; None, with a printed line, if widgets can't be imported."""
    try:
        return make()
    except ImportError as error:
        print(_no_widgets(error))
        return None


def _no_widgets(error: ImportError) -> str:
    return f"no widgets here, so this is HTML: {' '.join(str(error).split())}"


def preload_widgets(how: str) -> None:
    """Import the widgets in a thread, so that a report appears without delay after its run."""
    if how in ("auto", "widget") and _in_notebook(get_ipython()):
        Thread(target=_import_widgets, name="jaxshard widgets", daemon=True).start()


def _import_widgets() -> None:
    with suppress(ImportError):  # `show` prints the error
        import_module("jaxshard_magic.views.widget")


def _in_notebook(shell: Any) -> bool:
    """Return whether there is a kernel whose front end may show more than text."""
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and list(shell.display_formatter.active_types) != ["text/plain"]


def _show_widget(report: Report, *, alone: bool) -> None:
    try:
        view = _open_view(report)
    except ImportError as error:
        print(_no_widgets(error))
        # IPython's HTML formatter then shows the report.
        raise NotImplementedError("HTML") from None
    _display(view, report.to_text(), html.of_report(report, view.static_class), alone=alone)


def _display(view: "LiveView", text: str, static: str, *, alone: bool) -> None:
    """Display a widget, followed by its twin unless `alone`."""
    bundle, metadata = view._repr_mimebundle_() or ({}, {})
    if alone:
        display(bundle | {"text/plain": text}, metadata=metadata, raw=True)
        return
    # The twin has the text already.
    display(bundle | {"text/plain": ""}, metadata=metadata, raw=True)
    display({"text/plain": text, "text/html": static + _twin_style(view)}, raw=True)


def _twin_style(view: "LiveView") -> str:
    """Return a style for the twin in JupyterLab and Notebook.

    The style hides the line "model not found" above the twin in a reopened notebook. It also keeps space for the twin
    until the widget's model arrives; from then on the model does so.
    """
    above = f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{view.static_class})"
    return (
        f"<style>{above} > .jupyter-widgets:not(:has(*)){{display:none}}"
        f".jp-NotebookPanel .{view.static_class}{{animation:jsm-wait {WAIT}s}}"
        "@keyframes jsm-wait{0%,100%{visibility:hidden;max-height:640px;overflow:hidden}}</style>\n"
    )


def _open_view(shown: "Report | Comparison | Choice | Explorer") -> "LiveView":
    """Return the view of an object; a closed view is replaced by a new one."""
    # `view` is cached on the object. `Widget.close_all()` closes it, and a closed widget has no comm.
    if shown.view.comm is None:
        vars(shown).pop("view")
    return shown.view
