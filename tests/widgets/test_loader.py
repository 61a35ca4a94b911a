"""The small module that travels with each report: it finds the views' module, and evaluates it once a page."""

from typing import Any

from support.browsing import Stage

MODULE = """
globalThis.evaluated = (globalThis.evaluated ?? 0) + 1;
export const render = ({ model, el }) => {
  el.textContent = `drawn for ${model.get("name")}`;
  return () => el.remove();
};
"""
DRAW = """async ([digest, text, open]) => {
  const { default: loader } = await import("/loader.js");
  const el = document.createElement("div");
  document.body.append(el);
  const model = new stub.Model({ name: digest, _module: "IPY_MODEL_shared" });
  model.widget_manager = {
    get_model: async (id) => {
      if (!open || id !== "shared") throw new Error("widget model not found");
      return { get: (name) => ({ digest, text })[name] };
    },
  };
  model.send = (content) => {
    model.sent.push(content);
    setTimeout(() => model.tell("msg:custom", { kind: "another" }));
    setTimeout(() => model.tell("msg:custom", { kind: "module", digest, text }));
  };
  const end = await loader.render({ model, el });
  const said = { text: el.textContent, sent: model.sent, listening: model.listening };
  end();
  return { ...said, left: el.isConnected, evaluated: globalThis.evaluated };
}"""


def draw(show: Stage, digest: str, text: str = MODULE, *, readable: bool = True) -> dict[str, Any]:
    """Draw through the loader; `readable` says whether the front end gives the state of another model."""
    return show.page.evaluate(DRAW, [digest, text, readable])


def test_reports_of_one_kernel_share_one_module(show: Stage):
    first, second = draw(show, "one"), draw(show, "one", "throw new Error('evaluated again')")
    assert first["text"] == second["text"] == "drawn for one"
    assert second["evaluated"] == first["evaluated"]
    assert first["sent"] == []
    assert first["left"] is False, "what the module's render returns takes it away"


def test_a_module_of_another_kernel_is_another_one(show: Stage):
    before = draw(show, "this")["evaluated"]
    assert draw(show, "that")["evaluated"] == before + 1


def test_where_no_other_model_can_be_read_the_kernel_is_asked_for_the_text(show: Stage):
    asked = draw(show, "asked", readable=False)
    assert asked["text"] == "drawn for asked"
    assert asked["sent"] == [{"kind": "module"}]
    assert asked["listening"] == 0


HOLD = """async ([digest, text, open]) => {
  const { default: loader } = await import("/loader.js");
  const [el, twin] = [document.createElement("div"), document.createElement("p")];
  twin.className = `twin-of-${digest}`;
  twin.style.height = "2000px";
  document.body.append(el, twin);
  const model = new stub.Model({ _module: "IPY_MODEL_shared", _static: twin.className });
  model.widget_manager = { get_model: async () => ({ get: (name) => ({ digest, text })[name] }) };
  const seen = () => [getComputedStyle(twin).visibility, twin.getBoundingClientRect().height];
  loader.initialize({ model });
  const waiting = seen();
  await loader.render({ model, el }).catch(() => null);
  return { waiting, drawn: seen() };
}"""


def test_the_static_twin_keeps_room_unseen_until_its_view_is_drawn_or_can_not_be(show: Stage):
    for name, text in (("good", MODULE), ("bad", "throw new Error('no module')")):
        said = show.page.evaluate(HOLD, [name, text, True])
        assert said == {"waiting": ["hidden", 640], "drawn": ["visible", 2000]}, name
