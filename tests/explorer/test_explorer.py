"""What an explorer works out from shapes, with every expectation derived by hand."""

from math import prod

import pytest
from jax.sharding import PartitionSpec as P
from support.refusals import refusal
from support.sample_explorers import gpt, many, odd

from jaxshard_magic.errors import ShardError
from jaxshard_magic.explorer import DeviceSource, Explorer, ShardLine, find_arrays
from jaxshard_magic.explorer.shard_sizes import fit_to_mesh, next_multiple, num_replicas, shard_bytes

MIB = 2**20
WTE = 50257 * 768 * 4  # bytes


def typed(*words: str, **axes: int) -> Explorer:
    return Explorer(find_arrays(words, {}), axes or {"data": 4, "model": 2}, place=DeviceSource(), line=ShardLine())


def test_bytes_are_those_of_the_mocks_embedding():
    ex = gpt()
    assert shard_bytes((50257, 768), 32, ((), ("data", "model")), ex.axes) == WTE // 8
    assert ex.leaves[0].bytes_per_device == WTE // 4  # as it ran, over data=4
    ex["wte.embedding"] = P(None, ("data", "model"))
    assert ex.leaves[0].bytes_per_device == WTE // 8
    assert ex.copies("wte.embedding") == 1


def test_a_parameters_moments_go_with_it():
    ex = gpt()
    assert ex.follows("wte.embedding") == ["opt.mu.wte.embedding", "opt.nu.wte.embedding"]
    ex["wte.embedding"] = "P(None, ('data', 'model'))"
    whys = {leaf.path: leaf.why for leaf in ex.leaves}
    assert whys["wte.embedding"] == "set by hand" and "follows" in whys["opt.mu.wte.embedding"]
    assert [ex.arrays[i].path for i in ex.changed] == ["wte.embedding", *ex.follows("wte.embedding")]
    # three arrays of which a device held a quarter each, and now holds an eighth
    assert ex.bytes_now - ex.bytes_per_device == 3 * (WTE // 4 - WTE // 8)


def test_the_line_has_a_rule_for_what_differs_and_a_mesh_where_it_is_another():
    ex = gpt()
    assert ex.line == "%%shard fsdp+tp"
    ex["wte.embedding"] = P(None, ("data", "model"))
    assert ex.line == """%%shard fsdp+tp --rule "wte.embedding=P(None, ('data', 'model'))\""""
    ex.mesh = "data=2 model=4"
    assert ex.line.startswith('%%shard fsdp+tp --mesh "data=2 model=4" --rule ')
    ex["wte.embedding"] = P(None, "data")  # what the strategy does itself
    assert ex.line == '%%shard fsdp+tp --mesh "data=2 model=4"'


def test_to_set_a_moment_is_to_set_its_parameter():
    ex = gpt()
    ex["wte.embedding"] = P(None, "model")
    ex["opt.mu.wte.embedding"] = P(None, ("model", "data"))
    assert list(ex.wishes) == ["opt.mu.wte.embedding"]
    assert ex["wte.embedding"] == P(None, ("model", "data"))
    del ex["wte.embedding"]
    assert ex.wishes == {} and ex["wte.embedding"] == P(None, "data")


def test_what_the_mesh_can_not_do_waits_for_one_that_can():
    ex = typed("w=f32[12,8]")
    ex["w"] = P("data", "model")
    ex.mesh = "data=5 model=2"
    assert ex["w"] == P(None, "model"), "12 does not divide by 5"
    assert """"w=P(None, 'model')\"""" in ex.line
    ex.mesh = "data=3 model=2"
    assert ex["w"] == P("data", "model")
    ex.mesh = "model=2"
    assert ex["w"] == P(None, "model"), "no axis data"


def test_axes_that_divide_only_one_by_one_do_not_divide_together():
    mesh = {"data": 4, "model": 2}
    assert fit_to_mesh((("data", "model"),), (12,), mesh) == (("data",),)  # 12 = 4 x 3, and 8 does not divide it
    assert fit_to_mesh((("model", "data"),), (12,), mesh) == (("model",),)
    assert fit_to_mesh((("data",), ("data",)), (4, 4), mesh) == (("data",), ()), "an axis cuts one dimension"


@pytest.mark.parametrize(("size", "pieces", "next_one"), [(50257, 4, 50260), (50257, 2, 50258), (0, 4, 0), (8, 8, 8)])
def test_the_next_size_that_divides(size: int, pieces: int, next_one: int):
    assert next_multiple(size, pieces) == next_one


def test_scalars_empty_arrays_and_dimensions_of_one_are_arrays_like_others():
    ex = odd()
    sizes = {leaf.path: (leaf.bytes, leaf.bytes_per_device) for leaf in ex.leaves}
    assert sizes["step"] == (4, 4) and sizes["none"] == (0, 0) and sizes["thin"] == (60, 60)
    ex["thin"] = P(None, None, "data")
    assert ex.leaves[2].bytes_per_device == 20  # thirty bfloat16 over three devices
    ex["none"] = P(("data", "model"))
    assert ex.leaves[1].bytes_per_device == 0
    with pytest.raises(ShardError, match="has 1 entry, the array has 0 dimensions"):
        ex["step"] = P("data")


def test_types_narrower_than_a_byte_are_packed():
    ex = typed("q=int4[16,3]", data=2)
    ex["q"] = P("data")
    assert [(leaf.bytes, leaf.bytes_per_device) for leaf in ex.leaves] == [(24, 12)]


def test_a_mesh_of_five_axes_and_256_devices():
    ex = many()
    assert ex.devices == 256 and len(ex) == 1000
    ex["params.blocks.7.mlp.up.kernel"] = P(("data", "fsdp", "seq", "replica"), "model")
    leaf = ex.leaves[ex.index("params.blocks.7.mlp.up.kernel")]
    assert leaf.bytes_per_device == 8192 * 28672 * 4 // 256
    assert num_replicas(ex.cuts[0], ex.axes) == 256 // (8 * 2)  # data on dim 0, model on dim 2


def test_the_order_of_axes_in_a_dimension_is_kept():
    ex = typed("w=f32[64,64]")
    ex["w"] = P(("model", "data"))
    assert ex["w"] == P(("model", "data")) and "P(('model', 'data'))" in ex.line


def test_a_mesh_may_be_larger_than_what_is_attached():
    ex = typed("w=f32[4096,4096]")
    ex.mesh = "data=64 model=64"
    ex["w"] = P("data", "model")
    assert ex.bytes_per_device == 4096 * 4096 * 4 // 4096
    ex.mesh = "v5e:4x4 data=4 model=4"
    assert ex.place.count == 16 and ex.line.startswith('%%shard spmd --mesh "v5e:4x4 data=4 model=4" ')


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda ex: ex.__setitem__("wte.embedding", P("data")), "50257, which data=4 does not divide"),
        (lambda ex: ex.__setitem__("wte.embedding", P("modle")), "Did you mean 'model'?"),
        (lambda ex: ex.__setitem__("wte.embedding", P("model", "model")), "uses axis 'model' twice"),
        (lambda ex: ex.__setitem__("wte.embeding", P()), "Did you mean 'wte.embedding'?"),
        (lambda ex: ex["bias"], "several arrays end in 'bias'"),
        (lambda ex: setattr(ex, "mesh", "data=0"), "axis 'data' has the size 0"),
        (lambda ex: setattr(ex, "strategy", "fsdpp"), "'fsdpp' is no strategy"),
        (lambda ex: setattr(ex, "strategy", "pp+dp"), "the stages of a pipeline can't be explored"),
    ],
)
def test_what_can_not_be_says_so_in_one_line_and_changes_nothing(edit, says: str):
    ex = gpt()
    assert says in refusal(edit, ex)
    assert ex.line == "%%shard fsdp+tp" and ex.wishes == {}


def test_without_a_step_there_is_no_strategy_and_nothing_to_compile():
    ex = typed("w=f32[8,8]")
    with pytest.raises(ShardError, match="no step has run yet"):
        ex.strategy = "fsdp"
    with pytest.raises(ShardError, match="there is no step to compile"):
        ex.compile()


def test_a_strategy_that_can_not_be_planned_leaves_the_layout_and_says_why():
    ex = gpt()
    ex["wte.embedding"] = P(None, ("data", "model"))
    ex.strategy = "dp"
    assert ex.note, "there is no kernel behind the sample"
    assert ex["wte.embedding"] == P(None, ("data", "model"))
    assert ex.line.startswith("%%shard dp --rule")


def test_an_end_of_a_path_is_enough_and_a_parameter_is_meant_first():
    ex = gpt()
    assert ex.arrays[ex.index("mlp.up.kernel")].path == "blocks.mlp.up.kernel"
    assert ex.arrays[ex.index("count")].path == "opt.count"


def test_whoever_listens_hears_of_every_change_once():
    ex, heard = gpt(), []
    end = ex.listen(lambda: heard.append(ex.line))
    ex["wte.embedding"] = P(None, "model")
    ex["wte.embedding"] = P(None, "model")
    ex.mesh = "data=2 model=4"
    ex.mesh = "data=2 model=4"
    ex.reset()
    assert len(heard) == 3
    end()
    ex.mesh = "data=8"
    assert len(heard) == 3


def test_the_text_has_the_line_unbroken_and_fits_its_width():
    ex = many()
    ex["params.blocks.0.attn.qkv.kernel"] = P(("data", "fsdp"), None, "model")
    for width in (60, 100):
        lines = ex.to_text(width).splitlines()
        assert lines[-1].strip() == ex.line
        assert all(len(line) <= width for line in lines[:-1])
    html = ex.to_html()
    assert "<script" not in html and "and 988 more" in html


def test_names_are_printable_in_what_is_shown():
    ex = Explorer(
        find_arrays(["w=f32[8]"], {}),
        {"data": 2},
        place=DeviceSource(),
        line=ShardLine(other_options=("--name '\x1b[2J'",)),
    )
    assert "\x1b" not in ex.to_text(80) and "\x1b" not in ex.to_html()


def test_all_devices_together_hold_the_array_as_often_as_there_are_copies():
    ex = gpt()
    for leaf, cut in zip(ex.leaves, ex.cuts, strict=True):
        assert leaf.bytes_per_device * prod(ex.axes.values()) == leaf.bytes * num_replicas(cut, ex.axes)
