"""Experts and positions that are divided, as a report draws them, and what its hints say of the rows of experts."""

import re
from dataclasses import replace

import pytest
from support.sample_divided import EXPERTS, HOT, NUMBER, POSITIONS, RING
from support.sample_leaves import mesh
from support.sample_reports import divided

from jaxshard_magic.analysis.advice import Case, advise
from jaxshard_magic.report import ExpertLoad, Experts, Positions, Report
from jaxshard_magic.report.experts_positions import position_ranges
from jaxshard_magic.views.experts_positions import devices_along, layout_figures, load_text, ring_figures
from jaxshard_magic.views.payload import payload

NOTHING, FULL = "\u00b7", "\u2588"


def test_zig_zag_gives_each_device_a_part_from_either_end():
    assert position_ranges(POSITIONS, 8)[1] == ((512, 1024),)
    dealt = position_ranges(POSITIONS, 8, RING)
    assert dealt[0] == ((0, 256), (3840, 4096))
    assert sorted(part for parts in dealt for part in parts) == [(256 * k, 256 * (k + 1)) for k in range(16)]


def test_a_place_along_an_axis_has_the_devices_that_differ_in_the_others():
    report = replace(divided(), mesh=mesh({"data": 2, "expert": 4}))
    assert devices_along(report, ("expert",)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert devices_along(report, ("expert", "data")) == [[0], [4], [1], [5], [2], [6], [3], [7]]


def test_experts_positions_and_turns_are_told_and_drawn_in_every_view():
    report = divided()
    said = " ".join(report.to_text(100).split())
    markup, data = re.sub("<[^>]+>", "", report.to_html()), payload(report)["figures_of"]
    for words in (
        f"devices 8-15 {4 * NOTHING}{4 * FULL}{8 * NOTHING} experts 8-15",
        "positions 512-1023; in the ring 256-511 and 3584-3839",
        "device 0 has those of device 7: 1792-2303",
    ):
        assert words in said
        assert words.partition(f" {NOTHING}")[0] in markup
    drawn = [row for figure in data["layout"] for row in figure[3] if row[0] == "devices 8-15"]
    assert [row[1:] for row in drawn] == [[[[250, 0, 250, 1000, 1.0]], "experts 8-15"]]
    assert [len(figure[3]) for figure in data["communication"]] == [8]
    assert "keys and values of one device at a time, 4.00\u202fMiB" in markup
    assert "A2A expert (dispatch)" in said and "(turn, zig-zag)" in said


def test_the_keys_of_two_devices_go_round_in_one_turn():
    one = replace(POSITIONS, rings=(replace(RING, turns=2),))
    (figure,) = ring_figures(replace(divided(), positions=(one,)))
    assert "at its one turn forward a device sends keys" in figure.lead and len(figure.rows) == 2


def test_bars_are_rows_beside_the_mean_and_what_is_dropped_stands_on_top():
    load = ExpertLoad(8, 1, 3, 1, (5, 1, 2, 0), (3, 1, 2, 0), 5)
    assert load_text(load) == (
        "most to expert 0: 5 rows, 2.50 times the mean; 2 of 8 dropped (25%), 50% of the places empty"
    )
    report = replace(divided(), experts=(Experts(4, ("expert",), "places", (load,)),), positions=())
    _, bars = layout_figures(report)
    (row,) = bars.rows
    heights = [round(area.height, 2) for area in row.areas[:-1]]
    assert heights == [0.6, 0.4, 0.2, 0.4, 0.0]
    assert row.bars == (1.0, 0.2, 0.4, 0.0)
    assert not ring_figures(report)


def test_of_many_layers_the_most_uneven_are_drawn_in_their_order():
    layers = tuple(ExpertLoad(8, 1, chosen=(8 - k % 5, k % 5)) for k in range(20))
    report = replace(divided(), experts=(Experts(2, ("expert",), "sorted", layers),), mesh=mesh({"expert": 2}))
    _, bars = layout_figures(replace(report, positions=()))
    assert [row.name for row in bars.rows] == [f"layer {k}" for k in (0, 1, 5, 6, 10, 11, 15, 16)]
    assert "The 8 most uneven of 20 layers" in bars.lead


def test_of_many_devices_and_turns_as_many_are_drawn_as_are_told():
    report, ring = divided(), replace(RING, turns=16)
    many = replace(report, mesh=mesh({"expert": 16, "seq": 16}), experts=(EXPERTS,))
    many = replace(many, positions=(replace(POSITIONS, rings=(ring,)),))
    held, *_, lying = layout_figures(many)
    for figure, what in (
        (held, "devices along it"),
        (lying, "devices along it"),
        (*ring_figures(many), "turns"),
    ):
        assert len(figure.rows) == 8 and figure.lead.endswith(f" Of 16 {what} 8 are drawn.")
    pair = replace(POSITIONS, rings=(replace(RING, turns=2),))
    (turns,) = ring_figures(replace(report, mesh=mesh({"expert": 4, "seq": 2}), positions=(pair,)))
    assert "Devices 0 \u2192 1 \u2192 0: at its one turn forward" in turns.lead


def test_rows_that_were_not_counted_are_told_so_and_are_no_zeros():
    unknown = Experts(NUMBER, ("expert",), "places", (ExpertLoad(4096, 2, 256, 16),))
    report = Report.from_json(replace(divided(), experts=(unknown,)).to_json())
    assert report.experts[0].layers[0].dropped is None and report.experts[0].layers[0].empty is None
    assert "The rows of each were not counted" in " ".join(report.to_text().split())


def advised(experts: Experts, code: str) -> list[str]:
    case = Case(leaves=(), mesh=mesh({"expert": 4}), strategy="ep", experts=(experts,))
    return [f"{a.level}: {a.message}" for a in advise(case) if a.code == code]


def test_dropped_rows_are_a_warning_with_the_places_that_would_keep_them():
    (said,) = advised(EXPERTS, "experts-dropped")
    worst = EXPERTS.layers[3]
    assert worst.chosen is not None
    lost = worst.chosen[HOT + 3] - 256
    assert f"warning: {lost} of 8,192 rows (2.2%)" in said and "the worst of 4 layers" in said
    assert "has 16 places in each of 16 groups; 40 would have kept all, for 2.50 times the products" in said


@pytest.mark.parametrize(("most", "empty"), [(2, 0.75), (8, 0.75), (2, 0.25)])
def test_places_that_stay_empty_are_told_where_fewer_would_have_kept_all(most, empty):
    rows = (round(8 * (1 - empty)),) * 4
    said = advised(Experts(4, ("expert",), "places", (ExpertLoad(8, 1, 8, 1, rows, rows, most),)), "experts-empty")
    assert len(said) == (most < 8 and empty >= 0.5)
    if said:
        assert "75% of the places" in said[0] and "for 25% of the products" in said[0]


def test_devices_wait_for_the_one_whose_sorted_rows_are_most():
    # Devices have 60, 20, 10 and 10 of 100 rows: 25 on the mean, idle 1 - 25 / 60.
    rows = (50, 10, 10, 10, 5, 5, 5, 5)
    (said,) = advised(Experts(8, ("expert",), "sorted", (ExpertLoad(50, 2, chosen=rows),)), "experts-uneven")
    assert "warning: " in said and "experts 0 to 1 multiplies 2.40 times the mean of 25 rows" in said
    assert "idle 58%" in said
    even = Experts(8, ("expert",), "sorted", (ExpertLoad(50, 2, chosen=(12, 13) * 4),))
    assert not advised(even, "experts-uneven")
    assert not advised(replace(even, work="places"), "experts-uneven")


@pytest.mark.parametrize(
    ("attention", "rings", "says"),
    [
        ("gather", (), "attention, where there is any, gathers keys and values of all."),
        ("ring", (), "keys and values go round in a ring."),  # of a pipeline, whose stages have them
        ("ring", (replace(RING, zigzag=False),), "keys and values go round in a ring."),
        ("heads", (), "attention has its heads divided instead."),
    ],
)
def test_positions_say_how_attention_gets_at_those_of_other_devices(attention, rings, says):
    told = Positions(4096, ("seq",), attention, rings)
    (figure,) = layout_figures(replace(divided(), experts=(), positions=(told,)))
    assert f"512 on each device along it; {says}" in figure.lead
