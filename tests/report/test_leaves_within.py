"""Leaves on a part of the mesh: counted on the device that holds most, and told with their stage in every view."""

from dataclasses import replace
from itertools import product
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.browsing import Stage, expect
from support.sample_collectives import MIB
from support.sample_leaves import leaf, mesh
from support.sample_reports import bare
from support.sample_staged import STAGES, of_stage, staged

from jaxshard_magic.report import Leaf, Report
from jaxshard_magic.report.device_leaves import leaves_on_device, leaves_on_fullest, stored_bytes
from jaxshard_magic.views import leaf_rows, svg
from jaxshard_magic.views.format import SPACE, submesh_text
from jaxshard_magic.views.payload import payload

INFO = mesh(STAGES)


def square(stage: int, path: str, stages: int = 1, **fields) -> Leaf:
    """64 bytes for each of its devices."""
    return of_stage(stage, path, (4 * stages, 4), ("pipe",) if stages > 1 else (), stages=stages, **fields)


def told(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def test_a_leaf_keeps_its_part_of_the_mesh_in_json():
    report = replace(staged(), leaves=(square(1, "w", stages=2),))
    assert report.to_dict()["leaves"][0]["within"] == {"pipe": [1, 3]}
    assert Report.from_json(report.to_json()) == report
    old = report.to_dict()
    del old["leaves"][0]["within"]
    assert Report.from_dict(old).leaves[0].within == {}


def test_bytes_are_those_of_the_device_that_holds_most():
    everywhere = leaf("e", (4, 4), (), STAGES)
    leaves = [square(0, "a"), square(1, "b", stages=2), square(2, "c"), square(3, "d"), everywhere]
    assert [x.path for x in leaves_on_fullest(leaves)] == ["b", "c", "e"]  # stage 2 has a half of b, c, and e
    assert stored_bytes(leaves) == 3 * 64
    assert leaf_rows.role_bytes(leaves) == {"params": 3 * 64}
    assert [x.path for x in leaves_on_device(leaves, INFO, 7)] == ["d", "e"]  # device 7 is pipe 3, data 1
    assert stored_bytes([]) == 0


SPANS = st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda s: (s[0], min(4, s[0] + s[1])))
PARTS = st.dictionaries(st.sampled_from(("a", "b")), SPANS)


@given(st.lists(st.tuples(PARTS, st.integers(0, 9)), max_size=6))
def test_no_device_holds_more_than_the_fullest(parts):
    made = [Leaf("w", "params", (), "int8", (), n, n, "", within=within) for within, n in parts]

    def lies(x: Leaf, at: dict[str, int]) -> bool:
        return all(first <= at[a] < end for a, (first, end) in x.within.items())

    devices = [{"a": a, "b": b} for a, b in product(range(4), repeat=2)]
    assert stored_bytes(made) == max(sum(x.bytes_per_device for x in made if lies(x, at)) for at in devices)


def test_a_leaf_is_cut_and_copied_over_its_own_devices_alone():
    stack, one = square(1, "stack", stages=2), square(2, "one")
    assert leaf_rows.sized_dim_axes(stack, INFO) == ((("pipe", 2),), ())
    assert (leaf_rows.replica_count(stack, INFO), leaf_rows.replica_count(one, INFO)) == (2, 2)  # over data
    assert svg.blocks_text(stack, INFO) == "dim 0 in 2 over pipe; each block on 2 devices, on pipe=1-2 only"
    assert svg.blocks_text(one, INFO) == "whole, on 2 devices, on pipe=2 only"


def test_layers_that_differ_in_their_stage_are_one_row():
    leaves = [square(i // 4, f"layers.{i}.w") for i in range(16)]
    leaves += [replace(x, path=f"mu.{x.path}", role="optimizer") for x in leaves]
    (row,) = leaf_rows.fold(leaves)
    assert (row.path, row.members, row.bytes_per_device) == ("layers.0-15.w", 16, 4 * 64)
    assert submesh_text(row.leaves) == "on one of pipe=0-3"
    assert len(row.followers) == 16
    (below,) = leaf_rows.listing(replace(bare(), leaves=tuple(leaves))).notes
    assert told(below) == ("16 optimizer leaves are cut as the parameters they follow, 256 B on the fullest device")


def test_a_moment_follows_the_parameter_of_its_own_stage():
    leaves = [square(0, "a.w"), replace(square(1, "mu.a.w"), role="optimizer")]
    assert leaf_rows.followers(leaves) == {}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{}], ""),
        ([{"pipe": (2, 3)}], "on pipe=2"),
        ([{"pipe": (1, 3)}] * 3, "on pipe=1-2"),
        ([{"pipe": (0, 1)}, {"pipe": (3, 4)}, {"pipe": (1, 2)}], "on one of pipe=0-1,3"),
        ([{"pipe": (0, 2)}, {"pipe": (2, 4)}], "on 2 of pipe=0-3"),
        ([{"pipe": (2, 3), "data": (0, 1)}], "on pipe=2, data=0"),
    ],
)
def test_a_part_of_the_mesh_in_words(parts, said: str):
    assert submesh_text([replace(square(0, "w"), within=within) for within in parts]) == said


def test_text_and_html_say_where_leaves_lie_and_what_each_stage_holds():
    text, page = told(staged().to_text(100)), told(staged().to_html())
    assert "f32[50257,768@data] on pipe=0 " in text
    assert "blocks.0-11.mlp.up x12    f32[768,3072@data] on one of pipe=0-3" in text
    assert "f32[8@pipe,768,64@data] on pipe=1-2" in text
    assert "each whole on its part of pipe, 12.0 KiB on the fullest device" in text
    assert "opt.count" not in text and "whole on every device, 8 B together" in text  # the key alone
    for name in ("0-1 pipe=0", "2-3 pipe=1", "4-5 pipe=2", "6-7 pipe=3"):
        assert f"  {name}  " in text
    assert "devices 0, 1 (pipe=0)" in text
    assert "0 to 1 <small>pipe=0</small>" in page
    assert "Memory: devices 0, 1 (pipe=0) are fullest" in page
    assert "Layout: params 101 MiB" in page and "on the device that holds most of them" in page


def test_the_payload_tells_parts_of_the_mesh_once_each():
    data = payload(staged())
    parts = [data["withins"][i] for i in data["leaves"]["within"]]
    spans = [x.within.get("pipe") for x in staged().leaves]
    assert parts == [() if span is None else ((0, *span),) for span in spans]
    assert len(data["withins"]) == 6  # the whole mesh, four stages, two of them together
    assert data["memory"]["stages"] == [f"pipe={i // 2}" for i in range(8)]
    assert [g["stage"] for g in data["memory"]["groups"]] == ["pipe=0", "pipe=3", "pipe=1", "pipe=2"]


def test_devices_of_all_stages_are_told_by_their_ids_alone():
    report = staged()
    assert report.memory is not None
    alike = replace(report.memory.per_device[0], peak=600 * MIB)
    rows = tuple(replace(alike, device=i) for i in range(8))
    report = replace(report, memory=replace(report.memory, per_device=rows))
    assert "every device" in report.to_text(100) and "pipe=0)" not in report.to_text(100)


SPECS = [
    PartitionSpec(),
    PartitionSpec("pipe"),
    PartitionSpec("data", "pipe"),
    PartitionSpec(("pipe", "data")),
]


@pytest.mark.ci
def test_every_device_is_said_to_hold_what_jax_puts_there(show: Stage):
    axes = {"data": 2, "pipe": 4}
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    info, made, expected = mesh(axes, "simulated"), [], {}
    for i, (spec, (first, end)) in enumerate(product(SPECS, [(0, 1), (1, 3), (3, 4)])):
        place = NamedSharding(Mesh(devices[:, first:end], ("data", "pipe")), spec)
        bytes_held = 4 * prod(place.shard_shape((16, 12)))
        entries = (*spec, *[None] * (2 - len(spec)))
        span = {"pipe": (first, end)}
        made.append(Leaf(f"w{i}", "params", (16, 12), "float32", entries, 768, bytes_held, "", within=span))
        for device, part in place.devices_indices_map((16, 12)).items():
            ranges = (":" if s == slice(None) else f"{s.start}:{s.stop}" for s in part)
            expected[f"w{i}", device.id] = f"[{', '.join(ranges)}]"
    shown = show(replace(staged(), mesh=info, leaves=tuple(made), memory=None, advice=()))
    read = shown.root.locator(".jsm-detail-read [aria-live]")
    said = {}
    for each in made:
        shown.fire(leaf=each.path)
        expect(shown.root.locator(".jsm-detail-dims")).to_contain_text("only")
        for device in range(8):
            shown.fire(device=device)
            lines = read.inner_text().split("\n")
            if "holds nothing of it" not in lines[0]:
                said[each.path, device] = lines[1]
    assert said == expected


@pytest.mark.ci
def test_keys_and_clicks_in_an_array_stay_on_its_devices(show: Stage):
    shown = show(staged())
    shown.fire(leaf="adapters.kernel", device=7)  # on stages 1 and 2: devices 2 to 5
    shown.root.locator(".jsm-blocks").press("Enter")
    assert shown.traits()["device"] == 2
    shown.root.locator(".jsm-blocks").press("ArrowDown")
    assert shown.traits()["device"] == 4
    shown.root.locator(".jsm-map").press("ArrowDown")
    assert shown.traits()["device"] == 6
    expect(shown.root.locator(".jsm-detail-read")).to_contain_text("holds nothing of it")


def test_the_filter_finds_the_leaves_of_a_stage(show: Stage):
    shown = show(staged(), ["layout"])
    shown.root.get_by_role("searchbox").fill("pipe=1")
    own = [x for x in staged().leaves if 1 in range(*x.within.get("pipe", (0, 0)))]
    expect(shown.root.get_by_role("status").first).to_contain_text(f"{len(own)} of ")


def test_bars_of_memory_name_their_stage(show: Stage):
    shown = show(staged(), ["memory"])
    names = [each.get_attribute("aria-label") or "" for each in shown.panel.get_by_role("option").all()]
    assert [name.partition(":")[0] for name in names] == [f"device {i}, pipe={i // 2}" for i in range(8)]
    wide = {"pipe": 4, "data": 8}
    report = replace(staged(), mesh=mesh(wide))
    assert report.memory is not None
    rows = tuple(replace(report.memory.per_device[i // 4], device=i) for i in range(32))
    shown = show(replace(report, memory=replace(report.memory, per_device=rows)), ["memory"])
    names = [each.get_attribute("aria-label") or "" for each in shown.panel.get_by_role("option").all()]
    assert [told(name).partition(":")[0] for name in names] == [
        f"devices {8 * s} to {8 * s + 7}, 8 alike, pipe={s}" for s in (0, 3, 1, 2)
    ]
