"""The kernel's side of the explorer's widget: what is edited on either side is on the other one, too."""

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.utils.capture import capture_output
from jax.sharding import PartitionSpec as P
from support.cells import LOOP, STEP
from support.sample_explorers import gpt, hostile

from jaxshard_magic.errors import ShardError
from jaxshard_magic.explorer import Explorer
from jaxshard_magic.views.explorer_payload import payload, state
from jaxshard_magic.views.explorer_widget import ExplorerView

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def ex(given) -> Explorer:
    """A step that ran, explored."""
    given.run("%%shard fsdp" + STEP + LOOP)
    return given.run("%shard explore")


def sent(view: ExplorerView, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The names of what is told the browser from here on."""
    told: list[Any] = []
    monkeypatch.setattr(view, "send_state", lambda key=None: told.append(key))
    return told


def test_what_is_clicked_is_the_explorers(ex: Explorer):
    view = ex.view
    view.set_state({"wishes": {"state.w": [["data"], []]}})
    assert ex["w"] == P("data") and ex.line == "%%shard fsdp --rule \"state.w=P('data')\""
    view.set_state({"axes": [["data", 4], ["model", 2]], "strategy": "fsdp+tp"})
    assert (ex.mesh, ex.strategy) == ("data=4 model=2", "fsdp+tp")
    assert view.laid["strategy"] == "fsdp+tp" and view.laid["mesh"] == [["data", 4], ["model", 2]]
    plan = ex.stepped.plan("%%shard fsdp+tp", ex.place.mesh(ex.axes))
    assert view.laid["cuts"] == [[list(axes) for axes in cut] for cut in plan.cuts]


def test_what_is_set_in_python_is_shown(ex: Explorer, monkeypatch):
    view = ex.view
    ex.mesh = "data=2 model=4"
    assert view.axes == [["data", 2], ["model", 4]]
    ex["w"] = P(None, "model")
    assert view.wishes == {"state.w": [[], ["model"]]}
    ex.reset()
    assert view.wishes == {}
    view.leaf = "w"
    assert view.leaf == "state.w"


def test_the_button_compiles_and_its_answer_is_told(ex: Explorer):
    view = ex.view
    ex["w"] = P("data")
    view._handle_custom_msg({"kind": "compile"}, [])
    assert view.compiled is not None and view.compiled["line"] == ex.line and view.compiled["error"] is None
    names = [row[0] for row in view.compiled["rows"]]
    assert names[:3] == ["arrays", "at the peak", "sent in a step"]
    assert ex.compiled is not None and ex.compiled.report.timing.calls == 0
    before = view.compiled
    view._handle_custom_msg({"kind": "compile"}, [])
    assert view.compiled != before, "or a browser would wait for an answer that is the same"


def test_a_line_that_can_not_be_compiled_is_one_line_in_the_widget(ex: Explorer, monkeypatch):
    view = ex.view
    ex.mesh = "data=16"
    view._handle_custom_msg({"kind": "compile"}, [])
    assert view.compiled is not None
    assert "takes 16 devices, and there are 8" in view.compiled["error"]
    assert "\n" not in view.compiled["error"]
    view._handle_custom_msg({"kind": "no such"}, [])
    view._handle_custom_msg(None, [])


def test_an_exception_of_the_steps_own_is_one_line_as_well(given):
    given.run("%%shard dp" + STEP + LOOP)
    ex = given.run("%shard explore")
    given.run("loss_fn = None")
    ex.stepped.traces.clear()
    ex.view._handle_custom_msg({"kind": "compile"}, [])
    assert "TypeError" in ex.view.compiled["error"] and "\n" not in ex.view.compiled["error"]


@pytest.mark.parametrize(
    "junk",
    [
        {"axes": []},
        {"axes": [["data", 0]]},
        {"axes": [["data", 2], ["data", 2]]},
        {"axes": [["da ta", 2]]},
        {"axes": "data=8"},
        {"axes": [["data", 10**9]]},
        {"axes": [["a", 4096], ["b", 4096], ["c", 4096]]},
        {"strategy": "no such"},
        {"strategy": "pp+dp"},
        {"strategy": 7},
        {"wishes": {"no such": [[]]}},
        {"wishes": {"state.w": "data"}},
        {"wishes": {"state.w": [[1], []]}},
        {"wishes": [1]},
        {"leaf": "no such"},
        {"leaf": 3},
        {"device": -1},
        {"device": True},
    ],
    ids=str,
)
def test_a_front_end_that_sends_junk_is_told_what_holds(ex: Explorer, junk: dict[str, Any], monkeypatch):
    view, line = ex.view, ex.line
    told = sent(view, monkeypatch)
    view.set_state(junk)
    assert ex.line == line
    (name,) = junk
    assert told[-1] == [name]


def test_a_cut_of_another_rank_is_taken_back(ex: Explorer):
    ex.view.set_state({"wishes": {"state.w": [["data"]]}})
    assert ex.wishes == {} and ex.view.wishes == {}


def test_setting_what_is_not_there_is_an_error_in_python():
    view = gpt().view
    with pytest.raises(ShardError, match=r"Did you mean 'wte\.embedding'"):
        view.leaf = "wte.embeding"
    with pytest.raises(ShardError, match="no device"):
        view.device = -1


def test_the_payload_is_numbers_and_plain_text():
    data = payload(gpt())
    assert data["leaves"]["path"][0] == "wte.embedding"
    assert data["leaves"]["bytes"][0] == 50257 * 768 * 4
    assert data["now"][0] == 50257 * 768  # four bytes an element, over four devices
    assert data["leaves"]["dtype"][-1] == "key<fry>"
    text = str(payload(hostile())) + str(state(hostile()))
    assert "\x1b" not in text


def test_views_of_an_explorer_share_their_module_and_it_is_the_same_each_time():
    ex = gpt()
    assert ex.view is ex.view and ex.view._module is gpt().view._module


@pytest.fixture
def kernel(given, monkeypatch) -> Any:
    """A shell that takes itself for a kernel's."""
    monkeypatch.delenv("JAXSHARD_VIEW", raising=False)
    given.run("%%shard fsdp" + STEP + LOOP)
    given.shell.kernel = SimpleNamespace()
    return given.shell


def test_a_notebook_gets_the_widget_and_then_its_html_twin(kernel):
    with capture_output() as captured:
        kernel.run_cell("%shard explore -o ex").raise_error()
    widget, twin = (output.data for output in captured.outputs[-2:])
    ex = kernel.user_ns["ex"]
    assert widget[WIDGET]["model_id"] == ex.view.model_id
    assert twin["text/plain"] == ex.to_text() and ex.view.static_class in twin["text/html"]
    ex.view.close()
    with capture_output() as captured:
        kernel.run_cell("display(ex)").raise_error()
    assert captured.outputs[0].data[WIDGET]["model_id"] == ex.view.model_id, "a new one for a closed one"


def test_a_session_without_widgets_gets_html_or_text(kernel):
    for view, kinds in (("html", {"text/plain", "text/html"}), ("text", {"text/plain"})):
        with capture_output() as captured:
            kernel.run_cell(f"%config ShardSession.view = {view!r}\n%shard explore").raise_error()
        assert set(captured.outputs[-1].data) == kinds
