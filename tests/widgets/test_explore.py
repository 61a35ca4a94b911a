"""The explorer in a real browser, by pointer: every edit is worked out at once, and told to Python once."""

import re
from typing import Any

import pytest
from support.browsing import Stage, expect
from support.explored import RULE, WTE, button, chip, figures, follow, line, mesh, size
from support.sample_explorers import EXPLORERS, Turned, compiled, edited, gpt, hostile, many, odd
from support.thinned import thinned

from jaxshard_magic.views.explorer_payload import state
from jaxshard_magic.views.format import SPACE


@pytest.mark.ci
def test_it_begins_with_the_last_runs_largest_array(show: Stage):
    shown = show(gpt())
    expect(shown.root.get_by_role("combobox", name="array")).to_have_value(WTE)
    assert mesh(shown) == {"data": 4, "model": 2}
    # 50257 x 768 float32 over data=4, on two devices each
    assert figures(shown) == [
        "per device 36.8 MiB as now",
        "copies of each slice 2 2 devices hold the same",
        "with both moments \u00b10 per device, against this run",
    ]
    assert line(shown) == "%%shard fsdp+tp"
    expect(shown.root.locator(".jsm-ex-why")).to_contain_text("fsdp: dim 1 over data")
    assert shown.saved() == []


def test_an_axis_is_put_on_a_dimension_and_taken_off_it(show: Stage):
    shown = show(gpt())
    chip(shown, 1, "model").click()
    expect(chip(shown, 1, "model")).to_have_attribute("aria-pressed", "true")
    assert figures(shown) == [
        "per device 18.4 MiB now 36.8 MiB",  # an eighth
        "copies of each slice 1 nothing kept twice",
        "with both moments \u221255.2 MiB per device, against this run",  # three times 18.4 MiB
    ]
    assert line(shown) == RULE
    expect(shown.root).to_contain_text("sets 3 leaves: the parameter and its two moments")
    expect(shown.root.locator(".jsm-ex-why")).to_have_text("set by hand")
    expect(shown.root.locator(".jsm-ex-type")).to_contain_text("f32[50257,768@(data,model)]")
    assert shown.saved() == [{"wishes": {WTE: [[], ["data", "model"]]}}]
    chip(shown, 1, "data").click()
    assert "P(None, 'model')" in line(shown)
    chip(shown, 1, "model").click()
    assert "P()" in line(shown) and figures(shown)[0] == "per device 147 MiB now 36.8 MiB"


def test_axes_stand_in_the_order_in_which_they_were_put(show: Stage):
    shown = show(gpt())
    chip(shown, 1, "data").click()
    chip(shown, 1, "model").click()
    chip(shown, 1, "data").click()
    assert "P(None, ('model', 'data'))" in line(shown)


def test_what_does_not_divide_says_so_with_the_next_size_that_does(show: Stage):
    shown = show(gpt())
    said = "50257 does not divide by data=4 or model=2; the next size that does is 50260"
    expect(shown.root.locator(".jsm-ex-odd")).to_have_text(said)
    for axis in ("data", "model"):
        expect(chip(shown, 0, axis)).to_have_attribute("aria-disabled", "true")
    chip(shown, 0, "data").click(force=True)
    assert line(shown) == "%%shard fsdp+tp" and shown.saved() == []


def test_an_axis_moves_from_one_dimension_to_another(show: Stage):
    shown = show(gpt(), leaf="blocks.attn.out.kernel")  # f32[12,12@model,64,768@data]
    chip(shown, 2, "data").click()
    assert """P(None, 'model', 'data')""" in line(shown)
    assert figures(shown)[0] == "per device 3.38 MiB as now", "27 MiB over eight devices either way"
    expect(chip(shown, 3, "data")).to_have_attribute("aria-pressed", "false")


def test_doubling_an_axis_takes_from_another_while_all_devices_are_in_use(show: Stage):
    shown = show(gpt())
    button(shown, "double model").click()
    assert mesh(shown) == {"data": 2, "model": 4}
    assert line(shown) == '%%shard fsdp+tp --mesh "data=2 model=4"'
    assert figures(shown)[:2] == [
        "per device 73.6 MiB now 36.8 MiB",
        "copies of each slice 4 4 devices hold the same",
    ]
    button(shown, "halve model").click()
    assert mesh(shown) == {"data": 4, "model": 2} and line(shown) == "%%shard fsdp+tp"


def test_a_size_is_typed_and_more_devices_than_there_are_is_for_shapes_alone(show: Stage):
    shown = show(edited())
    size(shown, "data").fill("8")
    size(shown, "data").press("Enter")
    expect(shown.root).to_contain_text("16 of 8 devices")
    assert figures(shown)[0] == "per device 9.20 MiB now 36.8 MiB"  # a sixteenth
    button(shown, "compile").click(force=True)
    expect(shown.root).to_contain_text("not here: the mesh takes 16 devices, and there are 8")
    assert shown.page.evaluate("model.sent") == []
    size(shown, "data").fill("no")
    size(shown, "data").press("Enter")
    expect(shown.root.get_by_role("status").filter(has_text="no is no size here")).to_be_visible()
    assert mesh(shown) == {"data": 8, "model": 2}


def test_an_axis_is_added_renamed_and_removed(show: Stage):
    shown = show(edited())
    button(shown, "+ axis").click()
    assert mesh(shown) == {"data": 4, "model": 1, "seq": 2}
    name = shown.root.get_by_role("textbox", name="name of axis 3")
    name.fill("expert")
    name.press("Enter")
    chip(shown, 1, "expert").click()
    assert "P(None, ('data', 'model', 'expert'))" in line(shown)
    name.fill("data")
    name.press("Enter")
    expect(name).to_have_value("expert")
    button(shown, "remove expert").click()
    assert mesh(shown) == {"data": 8, "model": 1}
    assert "expert" not in line(shown)


def test_a_name_that_a_spec_uses_is_changed_in_it(show: Stage):
    shown = show(edited())
    name = shown.root.get_by_role("textbox", name="name of axis 1")
    name.fill("fsdp")
    name.press("Enter")
    assert line(shown) == (
        """%%shard fsdp+tp --mesh "fsdp=4 model=2" --rule "wte.embedding=P(None, ('fsdp', 'model'))\""""
    )


def test_what_the_mesh_can_not_do_waits_for_one_that_can(show: Stage):
    shown = show(edited())
    size(shown, "data").fill("5")
    size(shown, "data").press("Enter")
    assert line(shown) == """%%shard fsdp+tp --mesh "data=5 model=2" --rule "wte.embedding=P(None, 'model')\""""
    expect(shown.root.locator(".jsm-ex-odd").nth(1)).to_have_text(
        "768 does not divide by data=5; the next size that does is 770"
    )
    size(shown, "data").fill("4")
    size(shown, "data").press("Enter")
    assert line(shown) == RULE


def test_the_strategy_is_python_s_to_lay_out_and_what_is_set_by_hand_stays(show: Stage):
    shown = show(edited())
    shown.root.get_by_role("combobox", name="strategy").select_option("dp")
    assert line(shown) == RULE.replace("fsdp+tp", "dp")
    expect(shown.root).to_contain_text("the kernel is asked how it lays the other arrays out")
    assert shown.saved() == [{"strategy": "dp"}]
    now = edited()
    whole = [[[] for _ in a.shape] for a in now.arrays]
    plan = {"strategy": "dp", "mesh": [["data", 4], ["model", 2]], "cuts": whole, "why": [0] * len(whole)}
    shown.fire(laid={**plan, "whys": ["dp"], "given": [], "note": "", "count": 8, "made_of": "", "devices": []})
    expect(shown.root).not_to_contain_text("the kernel is asked")
    expect(shown.root.locator(".jsm-ex-total")).to_contain_text("All 45 arrays: ")
    assert figures(shown)[0] == "per device 18.4 MiB now 36.8 MiB"


def test_an_array_is_found_by_a_part_of_its_name_and_chosen(show: Stage):
    shown = show(gpt())
    box = shown.root.get_by_role("combobox", name="array")
    box.click()
    box.fill("down kernel")
    expect(shown.root.locator(".jsm-ex-list")).to_contain_text("3 of 45 arrays")
    shown.root.locator('[role=treeitem][title^="blocks.mlp.down.kernel "]').click()
    expect(shown.root.locator(".jsm-ex-list")).to_be_hidden()
    expect(box).to_have_value("blocks.mlp.down.kernel")
    assert shown.trait("leaf") == "blocks.mlp.down.kernel"
    assert figures(shown)[0] == "per device 13.5 MiB as now"  # 108 MiB over eight devices


def test_a_click_elsewhere_closes_the_list(show: Stage):
    shown = show(gpt())
    box = shown.root.get_by_role("combobox", name="array")
    box.click()
    expect(shown.root.get_by_role("tree")).to_be_visible()
    chip(shown, 1, "model").focus()
    expect(shown.root.get_by_role("tree")).to_have_count(0)
    expect(box).to_have_value(WTE)


def test_a_device_is_pointed_at_in_the_array_and_in_the_mesh(show: Stage):
    shown = show(edited())
    shown.root.locator(".jsm-map .jsm-ink").get_by_text("3", exact=True).click(force=True)
    read = shown.root.locator(".jsm-detail-read")
    expect(read).to_contain_text(f"device 3 data 1, model 1 holds 18.4{SPACE}MiB")
    expect(read).to_contain_text("[:, 288:384]")  # the fourth of eight pieces of 96
    expect(read).to_contain_text("no other device holds this slice")
    assert shown.trait("device") == 3


def test_devices_are_called_what_the_mesh_calls_them(show: Stage):
    ex = edited()
    ex.place = Turned()
    shown = show(ex)
    shown.root.locator(".jsm-map .jsm-ink").get_by_text("4", exact=True).click(force=True)
    expect(shown.root.locator(".jsm-detail-read")).to_contain_text("device 4 data 1, model 1 holds")
    shown.fire(laid=state(edited())["laid"])  # another slice of as many devices
    expect(shown.root.locator(".jsm-detail-read")).to_contain_text("device 3 data 1, model 1 holds")


def test_reset_leaves_the_array_to_the_strategy_again(show: Stage):
    shown = show(edited())
    button(shown, "reset").click()
    assert line(shown) == "%%shard fsdp+tp"
    expect(button(shown, "reset")).to_have_count(0)
    assert shown.saved() == [{"wishes": {}}]


def test_two_arrays_set_by_hand_are_two_rules(show: Stage):
    shown = show(edited())
    shown.fire(leaf="blocks.mlp.up.bias")
    chip(shown, 1, "data").click()  # after model
    assert line(shown).endswith("""--rule "blocks.mlp.up.bias=P(None, ('model', 'data'))\"""")
    expect(shown.root).to_contain_text("sets 6 leaves: 2 by hand, 4 that follow")


def test_what_the_browser_says_is_what_python_works_out(show: Stage):
    shown, ex = show(gpt()), gpt()
    chip(shown, 1, "model").click()
    button(shown, "double data").click()
    shown.fire(leaf="opt.mu.blocks.mlp.down.kernel")
    chip(shown, 0, "model").click()
    ex = follow(shown, ex)
    assert line(shown) == ex.line
    total = shown.root.locator(".jsm-ex-total").inner_text().replace(SPACE, " ")
    from jaxshard_magic.views.explorer import summary

    assert total == summary(ex).replace(SPACE, " ").rstrip(".")


def test_python_changes_the_picture(show: Stage):
    shown = show(gpt())
    shown.fire(wishes={WTE: [[], ["model"]]}, axes=[["data", 2], ["model", 4]])
    assert "P(None, 'model')" in line(shown) and mesh(shown) == {"data": 2, "model": 4}
    assert shown.saved() == []


def test_compile_is_pressed_once_and_answered_in_the_table(show: Stage):
    shown = show(edited())
    button(shown, "compile").click()
    busy = button(shown, "compiling\u2026")
    expect(busy).to_have_attribute("aria-disabled", "true")
    busy.click(force=True)
    assert shown.page.evaluate("model.sent") == [{"kind": "compile"}]
    expect(shown.root).to_contain_text("a kernel that is busy answers later")
    shown.fire(compiled=state(compiled())["compiled"])
    expect(button(shown, "compile")).to_be_visible()
    expect(shown.root.get_by_role("status").filter(has_text="compiled, as told below")).to_be_visible()
    table = shown.root.locator(".jsm-ex-table")
    rows = [" ".join(text.split()) for text in table.locator("tbody tr").all_inner_texts()]
    assert rows[1].replace(SPACE, " ") == "at the peak 4.10 GiB 5.09 GiB"
    expect(shown.root).to_contain_text("Fits: ")
    chip(shown, 1, "model").click()
    expect(shown.root.locator(".jsm-ex-compiled")).to_contain_text("an earlier line")


def test_what_is_edited_is_told_before_the_kernel_is_asked_to_compile(show: Stage):
    shown = show(gpt())
    chip(shown, 1, "model").click()
    button(shown, "compile").click()
    assert shown.page.evaluate("model.saved") == [{"wishes": {WTE: [[], ["data", "model"]]}}], "without a wait"


def test_the_picture_that_is_saved_is_asked_for_after_the_edits_are_told(show: Stage):
    shown = show(gpt())
    chip(shown, 1, "model").click()
    button(shown, "Save this picture as svg").click()
    assert shown.page.evaluate("model.saved") == [{"wishes": {WTE: [[], ["data", "model"]]}}]
    assert shown.page.evaluate("model.sent.at(-1)") == {"kind": "picture", "name": "layout", "theme": "light"}


def test_a_line_that_was_refused_says_why(show: Stage):
    shown = show(edited())
    refused: dict[str, Any] = {
        "line": "x",
        "error": "tp needs a mesh axis",
        "axes": [],
        "verdict": [],
        "rows": [],
    }
    shown.fire(compiled=refused)
    expect(shown.root.locator(".jsm-ex-compiled")).to_contain_text("tp needs a mesh axis")


def test_the_line_and_the_whole_cell_are_copied(show: Stage):
    shown = show(edited())
    button(shown, f"Copy {RULE}").click()
    assert shown.page.evaluate("navigator.clipboard.readText()") == RULE
    button(shown, "copy the whole cell").click()
    expect(shown.root).to_contain_text("the whole cell is copied: paste it into the next one")
    assert shown.page.evaluate("navigator.clipboard.readText()") == f"{RULE}\nstate, loss = train_step(state, batch)"


def test_a_classic_notebook_gets_the_cell_below_its_own(show: Stage):
    """Its pages have no document to write into, but the notebook itself."""
    notebook = """() => {
      const cells = ["first", "second"].map(() => ({ element: [document.body] }));
      cells[0] = { element: [document.createElement("p")] };
      const written = [];
      const insert_cell_below = (kind, at) => ({ set_text: (text) => written.push([kind, at, text]) });
      globalThis.Jupyter = { notebook: { get_cells: () => cells, insert_cell_below, written } };
    }"""
    show.page.evaluate(notebook)
    shown = show(edited())
    button(shown, "to the next cell").click()
    expect(shown.root).to_contain_text("written into the cell below; nothing has run")
    written = shown.page.evaluate("Jupyter.notebook.written")
    shown.page.evaluate("delete globalThis.Jupyter")
    assert written == [["code", 1, f"{RULE}\nstate, loss = train_step(state, batch)"]]


def test_without_a_step_there_is_neither_a_strategy_nor_a_compiler(show: Stage):
    shown = show(odd())
    expect(shown.root.get_by_role("combobox", name="strategy")).to_have_count(0)
    expect(button(shown, "compile")).to_have_count(0)
    shown.fire(leaf="thin")
    chip(shown, 2, "data").click()
    assert line(shown) == """%%shard spmd --mesh "data=3 model=2" --rule "thin=P(None, None, 'data')\""""
    assert figures(shown)[0] == "per device 20 B of 60 B"
    shown.fire(leaf="step")
    expect(shown.root).to_contain_text("one value: it has no dimension to cut")
    shown.fire(leaf="none")
    assert figures(shown)[0] == "per device 0 B of 0 B"


def test_a_thousand_arrays_on_256_devices_answer_in_a_tenth_of_a_second(show: Stage):
    shown = show(many())
    taken = shown.root.evaluate(
        """root => {
          const start = performance.now();
          root.querySelector('[data-k="chip-0-fsdp"]').click();
          return performance.now() - start;
        }"""
    )
    assert "P(('data', 'fsdp'), None, 'model')" in line(shown)
    assert taken < 100


@pytest.mark.parametrize("name", thinned(EXPLORERS, ("edited", "odd")))
def test_nothing_stands_out_and_nothing_is_hidden_from_a_screen_reader(show: Stage, name: str):
    for width, theme in ((868, "light"), (620, "dark"), (420, "light")):
        shown = show(EXPLORERS[name](), None, width, theme)
        assert shown.overflowing() == []
        assert shown.violations() == []


def test_names_never_become_markup(show: Stage):
    shown = show(hostile(), leaf=hostile().view.validate_choice("leaf", hostile().arrays[0].path))
    expect(shown.root.get_by_role("combobox", name="array")).to_have_value(re.compile("<script>alert"))
    chip(shown, 1, "d\u00e4ta").click()
    assert shown.page.locator("script").count() == 0


def test_it_leaves_nothing_behind(show: Stage):
    shown = show(gpt())
    chip(shown, 1, "model").click()
    shown.root.get_by_role("combobox", name="array").click()
    assert show.remove() == 0
