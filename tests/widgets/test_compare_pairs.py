"""Two trials of a comparison side by side in a real browser: what differs, and how a second one is chosen."""

import pytest
from support.browsing import Shown, Stage, expect
from support.comparison_page import BF16, FSDP, HEADS, STAGED, pair, row, rows, side, traits
from support.sample_comparisons import measured_trials, simulated

from jaxshard_magic.views.format import SPACE


def figures(shown: Shown, table: str) -> dict[str, list[str]]:
    """The cells of each row of a table of the pair, by what its row is called."""
    found = pair(shown).get_by_role("table", name=table).locator("tbody tr").all()
    cells = (each.get_by_role("cell").all_inner_texts() for each in found)
    heads = (each.get_by_role("rowheader").inner_text() for each in found)
    return {name: [text.strip() for text in texts] for name, texts in zip(heads, cells, strict=True)}


@pytest.mark.ci
def test_a_second_trial_shows_what_differs(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    expect(pair(shown)).to_be_hidden()
    row(shown, "fsdp").click(modifiers=["Shift"])
    said = pair(shown).inner_text().replace(SPACE, " ")
    # 53.6 - 39.0 ms, of 53.6; 4.18 - 3.44 GiB, of 4.18
    assert "fsdp+tp bf16 takes 14.6 ms (27%) less than fsdp, and holds 758 MiB (18%) less at its peak." in said
    sent = figures(shown, "Sent per device and step")
    assert sent["all-reduce data"] == ["473MiB", "1.22GiB", "\u2212772MiB"]
    assert sent["all-reduce model"] == ["288MiB", "\u2013", "+288MiB"]
    held = figures(shown, "Memory of the fullest device")
    assert held["batch"] == ["32.0KiB", "16.0KiB", "+16.0KiB"]  # 128 KiB over 4 and 8
    assert held["other"][2] == "same"
    assert held["peak"] == ["3.44GiB", "4.18GiB", "\u2212758MiB"]
    expect(rows(shown).get_by_text("A", exact=True)).to_have_count(1)
    expect(row(shown, "fsdp").get_by_text("B", exact=True)).to_have_count(1)


def test_leaves_are_listed_that_lie_differently_and_no_others(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=FSDP)
    told = figures(shown, "Leaves that lie differently")
    # 147 MiB over 4 and 8; what is cut over data=4 and model=2 has as many bytes as over data=8
    layout = "f32[50257,768@data]"
    assert told["wte.embedding"] == [layout, "36.8MiB", layout, "18.4MiB", "+18.4MiB"]
    assert list(told) == [
        "wte.embedding",
        "wpe.embedding",
        "blocks.mlp.up.bias",
        "blocks.attn.qkv.bias",
        "batch.tokens",
    ]
    assert "13 leaves, 8 of them the optimizer's" in pair(shown).inner_text()


def test_repeated_layers_are_one_row_and_a_long_list_is_cut(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=STAGED)
    told = figures(shown, "Leaves that lie differently")
    assert len(told) == 12
    more = pair(shown).get_by_role("button", name="Show all")
    more.click()
    told = figures(shown, "Leaves that lie differently")
    layer = next(cells for name, cells in told.items() if name == "blocks.0-11.mlp.up \u00d712")
    assert layer[0] == "\u2013" and "on one of pipe=0-3" in layer[2]
    assert len(told) > 12
    expect(pair(shown).get_by_role("row").nth(-len(told) + 12)).to_be_focused()


def test_trials_that_lie_alike_say_so(show: Stage):
    shown = show(simulated(), chosen=1, other=2)
    expect(pair(shown)).to_contain_text("None: all lie alike.")


def test_a_trial_is_set_beside_another_by_a_control_as_well(show: Stage):
    shown = show(measured_trials(), chosen=BF16)
    control = side(shown).get_by_label("compare with")
    control.select_option("fsdp")
    expect(pair(shown)).to_be_visible()
    assert traits(shown) == [BF16, FSDP]
    assert control.locator("option").all_inner_texts() == [
        "\u2013",
        "fsdp+tp",
        "dp",
        "fsdp",
        "pp+dp zb-h1",
        "tp",
    ]
    control.select_option("\u2013")
    expect(pair(shown)).to_be_hidden()
    assert traits(shown) == [BF16, None]


def test_choosing_the_second_of_a_pair_makes_it_the_first(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=FSDP)
    row(shown, "fsdp").click()
    assert traits(shown) == [FSDP, BF16]
    expect(pair(shown)).to_contain_text("fsdp takes 14.6\u202fms (37%) more")  # of 39.0
    row(shown, "fsdp+tp bf16").click(modifiers=["Shift"])
    assert traits(shown) == [FSDP, None]


def test_one_that_could_not_be_compiled_has_nothing_to_lay_beside(show: Stage):
    shown = show(measured_trials(), chosen=BF16, other=HEADS)
    expect(pair(shown)).to_contain_text("No figure is known of both.")
    expect(pair(shown).get_by_role("table")).to_have_count(0)
