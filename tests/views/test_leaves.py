"""The terminal's table of leaves: repeated layers in one row, what was not cut as wanted, and all when asked."""

import re
from dataclasses import replace

import pytest
from support.sample_reports import attached, bare, gpt_leaves, leaf, simulated

from jaxshard_magic.errors import ShardError
from jaxshard_magic.views import leaf_rows
from jaxshard_magic.views.format import SPACE


def test_repeated_layers_fold_into_one_row():
    axes = {"data": 2}
    leaves = [leaf(f"blocks.{i}.w", (4, 4), ("data",), axes) for i in range(12)]
    leaves += [leaf(f"blocks.{i}.b", (4,), (), axes, why="tiny") for i in (0, 1, 5)]
    leaves += [leaf("head.0.w", (4, 4), (), axes), leaf("head.1.w", (4, 4), (), axes)]
    rows = {r.path: (r.members, r.bytes_per_device) for r in leaf_rows.fold(leaves)}
    assert rows == {
        "blocks.0-11.w": (12, 384),
        "blocks.0-1,5.b": (3, 48),
        "head.0.w": (1, 64),
        "head.1.w": (1, 64),
    }


def test_leaves_of_two_numbers_fold_only_when_the_product_is_full():
    axes = {"data": 2}
    full = [leaf(f"b.{i}.experts[{j}].w", (4,), (), axes) for i in range(3) for j in (0, 1)]
    assert [r.path for r in leaf_rows.fold(full)] == ["b.0-2.experts[0-1].w"]
    assert len(leaf_rows.fold(full[:-1])) == 5


@pytest.mark.parametrize("layer", ["blocks.{}", "['params']['Block_{}']"])
@pytest.mark.parametrize(("many", "each"), [(11, 1), (2, 2)])
def test_the_norms_of_repeated_layers_fold_as_their_attention_does(layer: str, many: int, each: int):
    names = ("norm_1.scale", "norm_2.scale", "attn.q.kernel")
    leaves = [leaf(f"{layer.format(i)}.{n}", (8,), (), {"data": 2}) for i in range(many) for n in names]
    paths = [row.path for row in leaf_rows.fold(leaves)]
    assert [sum(path.endswith(name) for path in paths) for name in names] == [each] * 3


def test_optimizer_leaves_follow_the_parameter_whose_path_they_end_in():
    leaves = gpt_leaves()
    found = leaf_rows.followers(leaves)
    by_param = {x.path: [f.path for f in found.get(id(x), [])] for x in leaves if x.role == "params"}
    assert by_param["wte.embedding"] == ["opt.mu.wte.embedding", "opt.nu.wte.embedding"]
    assert all(len(follow) == 2 for follow in by_param.values())


def test_what_a_leaf_and_its_moments_lost_is_told_together():
    # 50257 * 768 * 4 bytes over data=4; half of it could have gone: 18.4 MiB, three times 55.2 MiB
    row = next(r for r in leaf_rows.fold(gpt_leaves()) if r.path == "wte.embedding")
    said = leaf_rows.unsharded_text(row).replace(SPACE, " ")
    assert said == "not cut over model, +18.4 MiB, +55.2 MiB with 2 optimizer leaves"


def test_every_leaf_not_cut_as_wanted_is_listed_or_counted():
    axes = {"data": 2}
    leaves = [leaf(f"{chr(97 + i)}.w", (64,), ("data",), axes) for i in range(20)]
    leaves += [leaf(f"{chr(97 + i)}.odd", (3 + 2 * i,), (), axes, wanted=("data",)) for i in range(15)]
    found = leaf_rows.listing(replace(bare(), leaves=tuple(leaves)))
    assert sum(bool(r.leaf.wanted) for r in found.rows) == leaf_rows.WANTED_ROWS
    assert found.notes[0].startswith("3 more leaves are not cut as wanted")


def test_leaves_without_a_row_that_are_whole_everywhere_are_counted():
    report = attached()
    whole = [x for x in report.leaves if not x.spec and x.role != "optimizer"] + [report.leaves[-3]]
    size = sum(x.bytes_per_device for x in whole)
    below = leaf_rows.listing(report).notes[0].replace(SPACE, " ")
    assert below == f"{len(whole)} more leaves are whole on every device, {size / 1024:.0f} KiB together"


def test_all_leaves_are_listed_one_by_one_when_asked():
    lines = attached().to_text(100, leaves="all").split("\n")
    for x in attached().leaves:
        assert any(line.split()[:1] == [x.path] for line in lines)


def test_any_number_of_leaves_may_be_asked_for():
    text = simulated().to_text(80, leaves=0)
    assert "Leaves, 1 of 45" in text
    assert 'to_text(leaves="all") lists every leaf' in text
    with pytest.raises(ShardError, match="leaves is 'many'; it is a number, or 'all' for every leaf"):
        simulated().to_text(80, leaves="many")


def test_a_long_path_keeps_its_two_ends_and_a_type_is_never_cut():
    axes = {"data": 2}
    deep = leaf("layer." * 20 + "kernel", (8,) * 9, ("data",), axes)
    path, kind = replace(bare(), leaves=(deep,)).to_text(60).split("\n")[-2:]
    assert re.fullmatch(r"  layer\.\S*\u2026\S*layer\.kernel  256 MiB", path)
    assert kind == "    f32[8@data,8,8,8,8,8,8,8,8]"


def test_a_report_without_leaves_has_no_such_part():
    assert "Leaves" not in replace(attached(), leaves=()).to_text(80)
