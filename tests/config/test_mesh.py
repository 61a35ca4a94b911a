import math
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support.refusals import refusal

from jaxshard_magic import simulate
from jaxshard_magic.config.mesh import MeshSpec, _built, axes_for, build, choose, default_spec, device_count, job_of
from jaxshard_magic.errors import ShardError
from jaxshard_magic.simulate import Machine, new_sharding

FOUR_BY_TWO = (("data", 4), ("model", 2))


# Reading


@pytest.mark.parametrize(
    "text",
    [
        "data=4 model=2",
        "data=4,model=2",
        " data = 4 ,  model=2 ",
        '[[4,2],["data","model"]]',
        "((4, 2), ('data', 'model'))",
    ],
)
def test_all_notations_of_a_mesh_read_the_same(text):
    assert MeshSpec.parse(text) == MeshSpec(FOUR_BY_TWO)


def test_the_config_file_notation_gives_sizes_then_names():
    assert MeshSpec.parse('[[4,2],["fsdp","tp"]]').axes == (("fsdp", 4), ("tp", 2))


@pytest.mark.parametrize(
    ("text", "source", "platform", "count"),
    [
        ("cpu:8 data=4 model=2", "simulated", "cpu", 8),
        ("CPU:8, data=4, model=2", "simulated", "cpu", 8),
        ('cpu:8 [[4,2],["data","model"]]', "simulated", "cpu", 8),
        ("v5e:4x2 data=4 model=2", "topology", "v5e", 8),
        ("v5p:2x2x2 data=4 model=2", "topology", "v5p", 8),
        ("h100:8 data=4 model=2", "topology", "h100", 8),
    ],
)
def test_the_devices_may_stand_before_the_axes(text, source, platform, count):
    spec = MeshSpec.parse(text)
    assert (spec.axes, spec.source, spec.platform, spec.count) == (FOUR_BY_TWO, source, platform, count)


def test_simulated_devices_without_axes_are_one_data_axis():
    assert MeshSpec.parse("cpu:8").resolve(8) == (("data", 8),)


names = st.from_regex(re.compile(r"[a-z_][a-z0-9_]{0,8}", re.ASCII), fullmatch=True)
axis_lists = st.lists(st.tuples(names, st.integers(1, 64)), min_size=1, max_size=4, unique_by=lambda a: a[0]).map(tuple)


@given(axes=axis_lists, hole=st.none() | st.integers(0, 3))
def test_a_mesh_reads_back_from_its_own_text(axes, hole):
    if hole is not None and hole < len(axes):
        axes = tuple((a, -1 if i == hole else n) for i, (a, n) in enumerate(axes))
    spec = MeshSpec(axes)
    assert MeshSpec.parse(str(spec)) == spec
    listed = [[n for _, n in axes], [a for a, _ in axes]]
    assert MeshSpec.parse(str(listed)) == spec


@given(axes=axis_lists.filter(lambda axes: math.prod(n for _, n in axes) <= simulate.MAX_DEVICES))
def test_a_simulated_mesh_reads_back_from_its_own_text(axes):
    spec = MeshSpec(axes, "simulated", "cpu", math.prod(n for _, n in axes))
    assert MeshSpec.parse(str(spec)) == spec


def test_a_slice_reads_back_from_its_own_text():
    assert str(MeshSpec.parse("v5e:4x4  data=4,model=4")) == "v5e:4x4 data=4 model=4"


@given(text=st.text(max_size=30) | st.text(alphabet="data=4 ,[]()\"':x-1cpu", max_size=30))
def test_any_text_is_a_mesh_or_one_clear_line(text):
    try:
        MeshSpec.parse(text)
    except ShardError as error:
        assert len(str(error).splitlines()) == 1


@given(axes=axis_lists, hole=st.integers(0, 3), times=st.integers(1, 8))
def test_minus_one_takes_what_is_left(axes, hole, times):
    hole %= len(axes)
    holed = tuple((a, -1 if i == hole else n) for i, (a, n) in enumerate(axes))
    devices = math.prod(n for _, n in holed if n != -1) * times
    assert MeshSpec(holed).resolve(devices)[hole] == (axes[hole][0], times)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is no mesh", "data=4 model=2"]),
        ("data", ["'data' is no mesh axis. Did you mean 'data=-1'? %mesh --help"]),
        ("nonsense", ["'nonsense' is no mesh axis", "cpu:8"]),
        ("data=4 modle", ["'modle' is no mesh axis. Did you mean 'model=-1'? %mesh --help"]),
        ("data 4", ["'data' is no mesh axis. Did you mean 'data=4'? %mesh --help"]),
        ("data4", ["Did you mean 'data=4'?"]),
        ("data:4 model:2", ["Did you mean 'data=4'?"]),
        ("4 2", ["'4' is no mesh axis"]),
        ("data=4 data=2", ["'data' twice", "its own name"]),
        ("data=0", ["size 0", "1 or more"]),
        ("data=-2", ["size -2", "-1 for what is left"]),
        ("data=four", ["'four'", "whole number", "data=4"]),
        ("data=", ["size ''"]),
        ("data=4.0", ["'4.0'"]),
        ("data=-1 model=-1", ["only one axis can be -1, not data and model"]),
        ("[[4,2],['data']]", ["2 sizes and 1 names"]),
        ("[4,2]", ["sizes, then names"]),
        ("[[4,'2'],['data','model']]", ["'2' is no whole number"]),
        ("[[4],[3]]", ["3 is no axis name"]),
        ("[[4,2", ["is no mesh"]),
        ("[{[]: 1}]", ["is no mesh"]),
        ("cpu:8 data=4 model=4", ["takes 16 devices (4 × 4), cpu:8 has 8", "Use cpu:16 data=4 model=4"]),
        ("cpu:8 data=-1 model=3", ["8 devices don't divide by 3", "Use cpu:9 data=-1 model=3"]),
        ("cpu:0 data=1", ["'cpu:0'", "1 to 512"]),
        ("cpu:513 data=513", ["'cpu:513'", "1 to 512"]),
        ("cpu:x data=8", ["'cpu:x'", "cpu:8"]),
        ("v5e:4x4 data=4 model=2", ["v5e:4x4 has 16", "Use data=8 model=2"]),
        ("v5e:4x4x4 data=64", ["'v5e:4x4x4'", "v5e:4x4"]),
        ("h100:2x2x2 data=8", ["'h100:2x2x2'", "h100:8"]),
        ("h10:8 data=8", ["'h10:8'", "Did you mean 'h100'?"]),
        ("gpu:8 data=8", ["'gpu:8' names no known hardware. Did you mean 'cpu'? %mesh --list has all"]),
        ("v6z:2x4 data=8", ["'v6z:2x4' names no known hardware. Did you mean 'v6e'? %mesh --list has all"]),
    ],
)
def test_what_is_no_mesh_is_refused_in_one_line(text, parts):
    message = refusal(MeshSpec.parse, text)
    for part in parts:
        assert part in message


# Which devices

CPU_1 = Machine("cpu", 1, 1)
CPU_8 = Machine("cpu", 8, 8)
TPU_1 = Machine("tpu", 1, 1)
TPU_1_CPU_8 = Machine("tpu", 1, 8)
GPU_8 = Machine("gpu", 8, 1)
NOTHING = Machine(None, 0, None)


@pytest.mark.parametrize(
    ("text", "machine", "chosen"),
    [
        ("data=4 model=2", CPU_8, "attached"),
        ("data=2 model=2", CPU_8, "attached"),
        ("data=4 model=2", CPU_1, "restart"),
        ("data=16", CPU_8, "restart"),
        ("data=4 model=2", GPU_8, "attached"),
        ("data=4", GPU_8, "attached"),
        ("data=1", TPU_1, "attached"),
        ("cpu:8 data=8", NOTHING, "start"),
        ("cpu:8 data=8", CPU_1, "restart"),
        ("cpu:8 data=8", CPU_8, "cpu"),
        ("cpu:4 data=4", CPU_8, "cpu"),
        ("cpu:8 data=8", TPU_1_CPU_8, "cpu"),
        ("cpu:1 data=1", TPU_1, "cpu"),
        ("cpu:8 data=8", Machine("gpu", 8, 0), "cpu"),
    ],
)
def test_which_devices_a_mesh_gets(text, machine, chosen):
    assert choose(MeshSpec.parse(text), machine) == chosen


@pytest.mark.parametrize(
    ("text", "machine", "parts"),
    [
        (
            "data=4 model=2",
            TPU_1,
            [
                "takes 8 devices",
                "1 device of platform tpu",
                "run %mesh cpu:8 data=4 model=2 first thing after a restart",
            ],
        ),
        ("data=4 model=2", TPU_1_CPU_8, ["1 device of platform tpu", "run %mesh cpu:8 data=4 model=2"]),
        ("data=16", GPU_8, ["takes 16 devices", "8 devices of platform gpu"]),
        (
            "cpu:8 data=8",
            TPU_1,
            ["beside the tpu", "1 device", "Restart the kernel and run %mesh cpu:8 data=8 first"],
        ),
        ("data=1024", CPU_1, ["1024 simulated devices; 512 are the most"]),
        ("data=16", Machine("cpu", 8, 8, processes=2), ["2 processes", "jax_num_cpu_devices"]),
    ],
)
def test_too_few_devices_are_refused_in_one_line(text, machine, parts):
    message = refusal(choose, MeshSpec.parse(text), machine)
    for part in parts:
        assert part in message


def test_simulated_devices_that_exist_already_need_no_restart():
    message = refusal(choose, MeshSpec.parse("data=4 model=2"), TPU_1_CPU_8)
    assert message.endswith("%mesh cpu:8 data=4 model=2")


def test_the_remedy_is_there_to_paste():
    with pytest.raises(ShardError) as caught:
        choose(MeshSpec.parse("data=4 model=2"), TPU_1)
    assert caught.value.fix == "%mesh cpu:8 data=4 model=2"


@pytest.mark.parametrize(
    ("text", "machine", "count"),
    [
        ("data=4 model=2", GPU_8, 8),
        ("data=-1 model=2", GPU_8, 8),
        ("data=-1 model=2", CPU_8, 8),
        ("data=-1 model=2", CPU_1, 8),
        ("data=-1 model=3", CPU_1, 9),
        ("data=-1 model=16", CPU_1, 16),
        ("cpu:4 data=-1", NOTHING, 4),
        ("data=-1", TPU_1, 1),
    ],
)
def test_how_many_devices_a_mesh_is_made_of(text, machine, count):
    assert device_count(MeshSpec.parse(text), machine) == count


@pytest.mark.parametrize(
    ("text", "axes", "count"),
    [
        ("v5e:16 data=16", {"data": 16}, 16),
        ("v5litepod-16 data=4 model=4", {"data": 4, "model": 4}, 16),
        ("v5p:2x2x2", {"data": 8}, 8),
        ("tpu7x:2x2x1 data=-1 model=2", {"data": 4, "model": 2}, 8),
        ("a100:2x8 data=2 model=8", {"data": 2, "model": 8}, 16),
    ],
)
def test_a_slice_has_the_devices_that_jax_counts_on_it(text, axes, count):
    spec = MeshSpec.parse(text)
    assert (spec.source, spec.count, dict(spec.resolve(count))) == ("topology", count, axes)


def test_a_mesh_of_the_devices_at_hand_has_auto_axes():
    n = jax.device_count()
    built = build(MeshSpec.parse(f"data={n} model=1"))
    assert built.mesh.shape == {"data": n, "model": 1}
    assert set(built.mesh.axis_types) == {AxisType.Auto}
    assert built.mesh.devices.flat[0] == jax.devices()[0]


class Chip:
    """An accelerator device, as far as a mesh looks at it."""

    platform, device_kind, process_index = "gpu", "H100", 0

    def __init__(self, number):
        self.id = number


def test_devices_left_over_are_noted_on_an_accelerator():
    built = _built((("data", 2),), [Chip(0), Chip(1)], unused=6)
    assert built.notes == ("using the first 2 of 8 devices",)
    assert built.source == "attached"


def test_a_shape_that_jax_cannot_lay_out_falls_back_to_plain_order(monkeypatch):
    def cannot(*_, **__):
        raise NotImplementedError("Failed to find assignment. More text.")

    monkeypatch.setattr(jax, "make_mesh", cannot)
    chips = [Chip(i) for i in range(4)]
    built = _built((("data", 2), ("model", 2)), chips)
    assert [d.id for d in built.mesh.devices.flat] == [0, 1, 2, 3]
    assert built.notes == ("devices in plain order, JAX knows no better one: Failed to find assignment",)


# Where an array goes when the mesh changes


@pytest.mark.parametrize(
    ("axes", "spec", "shape", "kept"),
    [
        ({"data": 8}, P("data"), (16,), True),
        ({"data": 4, "model": 2}, P(None, "data"), (3, 4), True),
        ({"data": 4, "model": 2}, P(("data", "model")), (8,), True),
        ({"data": 4, "model": 2}, P(), (3,), True),
        ({"data": 8}, P("data"), (12,), False),
        ({"data": 4, "model": 2}, P(("data", "model")), (4,), False),
        ({"fsdp": 8}, P("data"), (8,), False),
    ],
)
def test_an_array_keeps_its_spec_where_the_new_meshs_axes_divide_it(axes, spec, shape, kept):
    old = NamedSharding(jax.make_mesh((2, 2), ("data", "model")), spec)
    new = jax.make_mesh(tuple(axes.values()), tuple(axes))
    assert new_sharding(old, shape, new) == (NamedSharding(new, spec) if kept else None)


def test_an_array_committed_to_a_device_keeps_its_device():
    device = jax.devices()[3]
    found = new_sharding(SingleDeviceSharding(device), (5,), jax.make_mesh((8,), ("data",)))
    assert found == SingleDeviceSharding(device)


# Jobs


@pytest.mark.parametrize(
    ("names", "job"),
    [
        ("data dp batch replica Data DP", "data"),
        ("fsdp FSDP", "fsdp"),
        ("model tp tensor TP", "tensor"),
        ("seq sp sequence context cp", "sequence"),
        ("pipe pp stage pipeline", "pipeline"),
        ("expert ep", "expert"),
        ("x hosts data2", None),
    ],
)
def test_the_name_of_an_axis_says_its_job(names, job):
    assert {job_of(name) for name in names.split()} == {job}


def test_the_axes_for_a_job_come_in_the_order_of_the_mesh():
    mesh = jax.make_mesh((1, 1, 1), ("replica", "tp", "data"))
    assert axes_for(mesh, "data") == ("replica", "data")
    assert axes_for(mesh, "tensor") == ("tp",)
    assert axes_for(mesh, "pipeline") == ()


@pytest.mark.parametrize(
    ("jobs", "devices", "platform", "text"),
    [
        (["data"], 8, "gpu", "data=8"),
        (["fsdp"], 8, "gpu", "data=8"),
        (["tensor"], 4, "gpu", "model=4"),
        (["sequence"], 4, "gpu", "seq=4"),
        (["fsdp", "tensor"], 8, "gpu", "data=4 model=2"),
        (["tensor", "data"], 8, "tpu", "data=4 model=2"),
        (["data", "fsdp"], 8, "gpu", "data=2 fsdp=4"),
        (["data", "fsdp", "tensor"], 8, "gpu", "data=2 fsdp=2 model=2"),
        (["data", "fsdp"], 2, "gpu", "data=1 fsdp=2"),
        (["data", "tensor"], 1, "tpu", "data=1 model=1"),
        (["data", "tensor"], 3, "gpu", "data=3 model=1"),
        (["data"], 1, "cpu", "data=8"),
        (["fsdp", "tensor"], 1, "cpu", "data=4 model=2"),
        (["data"], 4, "cpu", "data=4"),
        ([], 8, "gpu", "data=8"),
    ],
)
def test_the_mesh_of_a_strategy_when_the_user_names_none(jobs, devices, platform, text):
    assert str(default_spec(jobs, devices, platform)) == text
