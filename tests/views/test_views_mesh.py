"""A mesh as text: its devices in their places, cut where they are many, and told by their hosts."""

from dataclasses import replace

import pytest
from support.sample_reports import attached, mesh

from jaxshard_magic.views.meshgrid import mesh_html, mesh_text
from jaxshard_magic.views.terminal import display_width

MESHES = [{"data": 1}, {"data": 8}, {"data": 512}, {"data": 4, "model": 2}, {"data": 64, "model": 8}]
MESHES += [
    {"a": 2, "b": 4, "c": 3},
    {"a": 8, "b": 8, "c": 8},
    {"a": 4, "b": 2, "c": 4, "d": 2},
    {"x": 2, "y": 256},
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_fits_the_terminal(axes: dict[str, int]):
    lines = mesh_text(mesh(axes), 80).split("\n")
    assert max(map(display_width, lines)) <= 80
    assert len(lines) <= 40


def test_a_mesh_of_two_axes_is_a_grid_with_its_coordinates():
    assert mesh_text(mesh({"data": 4, "model": 2}, "simulated")).split("\n") == [
        "data=4 model=2   8 simulated CPU devices",
        "",
        "            model",
        "            0  1",
        "  data  0 \u2502 0  1",
        "        1 \u2502 2  3",
        "        2 \u2502 4  5",
        "        3 \u2502 6  7",
    ]


def test_a_mesh_shows_the_devices_in_its_own_order():
    order = (0, 1, 3, 2)
    lines = mesh_text(mesh({"x": 2, "y": 2}, devices=order)).split("\n")
    assert [line.split("\u2502")[1].split() for line in lines[-2:]] == [["0", "1"], ["3", "2"]]


def test_how_what_is_sent_goes_along_an_axis_is_told_where_something_is():
    report = attached()
    assert report.timing is not None
    along = {"data": "ICI ring, both directions, 90.0 GB/s; 2 hops from end to end", "model": "ICI line"}
    told = replace(report, timing=replace(report.timing, ways=along))
    assert f"\n  data: {along['data']}\n  model: ICI line\n" in told.to_text(100)
    assert "2 hops from end to end" in told.to_html()
    alone = [c for c in report.collectives or () if c.axes == ("data",)]
    assert "model: ICI" not in replace(told, collectives=tuple(alone)).to_text(100), "nothing goes along model"


def test_a_mesh_over_hosts_tells_which_devices_each_has():
    over = mesh({"data": 2, "model": 4}, "simulated", hosts=(0, 0, 1, 1) * 2)
    text = mesh_text(over)
    assert "8 simulated CPU devices on 2 hosts" in text
    assert text.endswith("\n\n  host 0: 0\u20131, 4\u20135\n  host 1: 2\u20133, 6\u20137")
    marked = mesh_html(over)
    assert marked.count("border-left:3px") == 2, "a line in each row, between the second and the third device"
    assert "border-top:3px" not in marked and "host 1: 2" in marked
    many = mesh({"data": 40}, hosts=tuple(range(40)))
    assert mesh_text(many).endswith("  host 6: 6\n  and 33 more hosts")


def test_a_mesh_of_three_axes_has_a_grid_for_each_index_of_the_first():
    text = mesh_text(mesh({"data": 2, "fsdp": 2, "model": 2}))
    assert "data 0" in text
    assert "data 1" in text
    assert text.count("fsdp  0") == 2


def test_a_large_mesh_is_cut_in_the_middle_and_says_what_it_leaves_out():
    assert mesh_text(mesh({"data": 512})).split("\n")[-1].split()[-2:] == ["\u2026", "511"]
    assert mesh_text(mesh({"a": 8, "b": 8, "c": 8})).endswith("and 6 more grids like these")
