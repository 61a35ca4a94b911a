"""`report.view`: the widget of a report, and what its reader selects, read and set from Python."""

import copy
import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ipywidgets import Widget
from support.sample_reports import attached, bare, hostile, large

from jaxshard_magic.errors import ShardError
from jaxshard_magic.views import widget
from jaxshard_magic.views.payload import packed_report

STATIC = Path(widget.__file__).parents[1] / "static"


@pytest.fixture
def view() -> widget.ReportView:
    return attached().view


class Front:
    """What a view sends to its front end, kept."""

    def __init__(self, view: widget.ReportView, monkeypatch: pytest.MonkeyPatch):
        self.messages: list[Any] = []
        self.states: list[Any] = []
        monkeypatch.setattr(view, "send", lambda content, buffers=None: self.messages.append(content))
        monkeypatch.setattr(view, "send_state", lambda key=None: self.states.append(key))


def test_a_view_has_its_report_and_sends_it_packed():
    report = attached()
    assert report.view.report is report
    assert report.view.get_state()["_data"] == packed_report(report)


def test_a_report_has_one_view():
    report = attached()
    report.view.leaf = "wte.embedding"
    assert report.view is report.view
    assert report.view.leaf == "wte.embedding"


def test_nothing_is_selected_at_first_but_the_first_tab(view):
    assert (view.leaf, view.device, view.tab) == (None, None, "layout")
    assert bare().view.tab is None


def test_a_selection_is_set_and_cleared(view):
    view.leaf, view.device, view.tab = "opt.count", 5, "memory"
    assert (view.leaf, view.device, view.tab) == ("opt.count", 5, "memory")
    view.leaf = view.device = view.tab = None
    assert (view.leaf, view.device, view.tab) == (None, None, "layout")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "leaf",
            "blocks.mlp.up.kernl",
            "no leaf 'blocks.mlp.up.kernl'. Did you mean 'blocks.mlp.up.kernel'?",
        ),
        ("leaf", "up.kernel", "no leaf 'up.kernel'. Did you mean 'blocks.mlp.up.kernel'?"),
        ("leaf", "zzzz", "no leaf 'zzzz'. The first of 45 is 'wte.embedding'"),
        ("leaf", 3, "no leaf 3. The first of 45 is 'wte.embedding'"),
        ("device", 8, "no device 8 in this mesh; its devices are 0 to 7"),
        ("device", "0", "no device '0' in this mesh; its devices are 0 to 7"),
        ("device", True, "no device True in this mesh; its devices are 0 to 7"),
        (
            "tab",
            "memroy",
            "no tab 'memroy'. Did you mean 'memory'? This report's tabs are layout, memory, communication",
        ),
    ],
)
def test_what_the_report_does_not_have_is_refused_in_one_line(view, name, value, message):
    with pytest.raises(ShardError) as error:
        setattr(view, name, value)
    assert str(error.value) == message
    assert (view.leaf, view.device, view.tab) == (None, None, "layout")


def test_a_long_wrong_name_is_told_short_and_on_one_line(view):
    with pytest.raises(ShardError) as error:
        view.leaf = "w\n" * 5000
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_device_ids_are_those_of_the_mesh():
    report = attached()
    view = replace(report, mesh=replace(report.mesh, devices=(8, 9, 10, 11, 20, 21, 22, 23))).view
    view.device = 20
    with pytest.raises(ShardError, match="its devices are 8 to 11, 20 to 23"):
        view.device = 0


def test_what_the_reader_clicks_is_read_in_python(view):
    seen = []
    view.observe(lambda change: seen.append(change["new"]), "leaf")
    view.set_state({"leaf": "rng", "device": 3, "tab": "communication"})
    assert (view.leaf, view.device, view.tab) == ("rng", 3, "communication")
    assert seen == ["rng"]


@pytest.mark.parametrize("junk", ["no such", 1e9, [], {}, True, "\0"])
def test_a_front_end_that_sends_junk_is_told_what_holds(view, junk, monkeypatch):
    view.device = 2
    front = Front(view, monkeypatch)
    view.set_state({"leaf": junk, "device": junk, "tab": "memory"})
    assert (view.leaf, view.device, view.tab) == (None, 2, "memory")
    assert front.states[-1] == ["leaf", "device"]


def test_a_name_with_control_characters_is_selected_as_it_is_shown():
    report = hostile()
    report.view.leaf = report.leaves[0].path
    assert report.view.leaf.startswith("<script>alert('x')</script>")
    assert "\x1b" not in report.view.leaf
    report.view.set_state({"leaf": report.view.leaf})
    assert report.view.leaf.endswith(".kernel")


def test_copies_pickles_and_equality_know_nothing_of_the_view(view):
    report = view.report
    for other in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other == report and "view" not in other.__dict__
    assert replace(report, name="other").view is not view
    assert report == attached() and repr(report) == repr(attached())
    assert "view" not in report.to_dict()


def test_the_views_module_travels_once_for_all_reports(view):
    other = large().view
    assert view._module is other._module
    text = view._module.text
    assert text == (STATIC / "report.js").read_text(encoding="utf-8")
    assert view._module.digest == hashlib.sha256(text.encode()).hexdigest()[:16]
    state = view.get_state()
    assert state["_module"] == f"IPY_MODEL_{view._module.model_id}"
    assert text not in state.values()
    assert view._module.get_state()["_model_module"] == "@jupyter-widgets/base"


def test_closed_widgets_come_back():
    report = attached()
    old, module = report.view, report.view._module
    Widget.close_all()
    assert attached().view._module is not module
    assert old.comm is None


def test_a_front_end_may_ask_for_the_module(view, monkeypatch):
    front = Front(view, monkeypatch)
    view._handle_custom_msg({"kind": "module"}, [])
    assert front.messages == [
        {"kind": "module", "digest": view._module.digest, "text": view._module.text},
    ]
    for junk in ({"kind": "x"}, {}, "module", None, 3):
        view._reply(view, junk, [])
    assert len(front.messages) == 1


def test_the_twin_is_named_after_the_model(view):
    assert view.get_state()["_static"] == f"jsm-static-{view.model_id}" == view.static_class


def test_what_travels_with_each_report_is_its_data_and_a_small_loader():
    state = attached().view.get_state()
    rest = {name: value for name, value in state.items() if name != "_data"}
    assert len(state["_data"]) < 5_000
    assert sum(len(str(value)) for value in rest.values()) < 8_000
    assert state["_esm"] == (STATIC / "loader.js").read_text(encoding="utf-8")
