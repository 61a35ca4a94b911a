"""The table of chips is plausible and complete, finds a chip by any name, and knows what carries a mesh axis."""

import math
import tomllib
from importlib.resources import files

import pytest
from support.refusals import refusal

from jaxshard_magic.hardware import chip, chip_of, chips, interconnects
from jaxshard_magic.links import axis_links

GB = 1e9
TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
GPUS = ("v100", "a100", "h100", "h200", "b200", "gb200", "l4", "t4")
each_chip = pytest.mark.parametrize("row", chips().values(), ids=list(chips()))


def rates(name: str, topology: tuple[int, ...] | None = None, **axes: int) -> dict[str, float | None]:
    """GB/s along each axis."""
    wires = axis_links(chip(name), axes, topology)
    return {axis: None if w.bandwidth is None else w.bandwidth / GB for axis, w in wires.items()}


def why(name: str, axis: str, topology: tuple[int, ...] | None = None, **axes: int) -> str:
    return axis_links(chip(name), axes, topology)[axis].description


@each_chip
def test_every_chip_says_where_its_figures_are_from(row):
    assert row.source
    assert all(page.startswith("https://") for page in row.source)


def test_every_interconnect_says_where_its_figure_is_from():
    table = tomllib.loads((files("jaxshard_magic") / "hardware.toml").read_text())
    assert all(row["source"].startswith("https://") for row in table["interconnects"].values())


@each_chip
def test_the_units_are_flops_and_bytes(row):
    assert 8 * 2**30 <= row.hbm <= 200 * 2**30
    assert 1e11 < row.hbm_bandwidth < 1e13
    assert all(1e12 < rate < 1e16 for rate in row.flops.values())
    assert row.link.bandwidth is None or 1e10 < row.link.bandwidth <= 1e11
    assert row.network is None or 1e9 < row.network.bandwidth < 1e11


@each_chip
def test_a_matmul_needs_dozens_to_hundreds_of_operations_a_byte(row):
    fastest = row.peak("bfloat16") or row.peak("float16")
    assert 50 < fastest / row.hbm_bandwidth < 700


@each_chip
def test_smaller_types_are_no_slower(row):
    order = [row.flops[key] for key in ("f32", "tf32", "f16", "fp8") if key in row.flops]
    assert order == sorted(order)
    assert row.flops.get("int8", math.inf) >= row.flops.get("bf16", 0)


@each_chip
def test_a_program_gets_less_than_there_is(row):
    if row.kind == "tpu":
        assert row.visible is None
        assert 0.9 * row.hbm < row.usable < row.hbm
    else:
        assert 0.9 * row.hbm < row.visible < row.hbm
        assert row.usable == pytest.approx(0.75 * row.visible)


@each_chip
def test_a_gpu_says_what_xla_asks_of_it(row):
    assert (row.compiler is None) == (row.kind == "tpu")
    if row.compiler is not None:
        assert chip_of(row.compiler["device_kind"]) is row
        assert all(page.startswith("https://") for page in row.compiler["source"])


@each_chip
def test_the_cores_and_clock_of_a_gpu_give_its_float32_rate(row):
    if row.compiler is not None:
        lanes = row.compiler["core_count"] * row.compiler["fpus_per_core"]
        assert 2 * lanes * row.compiler["clock_rate_ghz"] * 1e9 == pytest.approx(row.flops["f32"], rel=0.07)


@each_chip
def test_the_links_of_a_gpu_add_up_to_their_kind(row):
    if row.kind == "gpu":
        assert row.link.bandwidth * row.link.links == interconnects()[row.link.name]


def test_pcie_is_its_transfers_on_16_lanes_less_the_coding():
    for generation, transfers in ((3, 8e9), (4, 16e9), (5, 32e9)):
        published = interconnects()[f"PCIe {generation} x16"]
        assert published == pytest.approx(transfers * 16 / 8 * 128 / 130, rel=1e-3)


def test_networks_are_an_eighth_of_their_bits():
    assert interconnects()["InfiniBand NDR"] == 400e9 / 8
    assert interconnects()["InfiniBand HDR"] == 200e9 / 8
    assert interconnects()["100 Gb Ethernet"] == 100e9 / 8
    assert interconnects()["10 Gb Ethernet"] == 10e9 / 8


def test_names_and_aliases_are_unique():
    words = [w.lower() for c in chips().values() for w in {c.key.lower(), c.name.lower(), *c.aliases}]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("name", [*TPUS, *GPUS])
def test_a_short_name_is_a_chip(name):
    assert chip(name).kind == ("tpu" if name in TPUS else "gpu")


@pytest.mark.parametrize(
    ("device_kind", "key"),
    [
        ("TPU v2", "v2"),
        ("TPU v3", "v3"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_an_attached_device_is_known_by_its_kind(device_kind, key):
    found = chip_of(device_kind)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize("device_kind", ["cpu", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"])
def test_a_device_that_is_not_in_the_table_is_none(device_kind):
    assert chip_of(device_kind) is None


def test_a_name_is_found_in_any_case_and_spacing():
    assert chip("V5E") is chip(" tpu  V5 LITE ") is chip("TPU v5e") is chips()["v5e"]
    assert chip("A100") is chip("a100-80")


def test_an_unknown_chip_gives_the_nearest_name():
    message = refusal(chip, "H1000")
    assert message.startswith("'H1000' names no known chip. Did you mean 'h100'? %mesh --list has all")


def test_float32_is_counted_as_jax_computes_it_by_default():
    assert chip("v5e").peak("float32") == 197e12  # bfloat16
    assert chip("a100").peak("float32") == 156e12  # tensorfloat32
    assert chip("v100").peak("float32") == 15.7e12  # has no tensorfloat32


def test_peaks_are_dense_and_unknown_ones_none():
    assert chip("h100").peak("bfloat16") == pytest.approx(1979e12 / 2, rel=1e-3)  # half the sparse figure
    assert chip("h100").peak("float8_e4m3fn") == chip("h100").peak("float8_e5m2") == 1978.9e12
    assert chip("v5e").peak("int8") == 393e12
    assert chip("v5e").peak("float64") is None
    assert chip("t4").peak("bfloat16") is None
    assert chip("h100").peak("int4") is None


def test_a_device_of_a_split_chip_has_half_of_it():
    assert chip("v3").peak("bfloat16") == 123e12 / 2
    assert chip("tpu7x").peak("bfloat16") == 2307e12 / 2
    assert chip("tpu7x").hbm == 192 * 2**30 // 2
    assert chip("v4").peak("bfloat16") == 275e12  # both cores are one device


def test_jax_has_the_same_memory_and_rates_for_tpus():
    tpu_info = pytest.importorskip("jax.experimental.pallas.tpu")
    if not hasattr(tpu_info, "get_tpu_info_for_chip"):
        pytest.skip("this JAX has no table of TPUs")
    for key, cores in (("v4", 2), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("tpu7x", 1)):
        version = tpu_info.ChipVersion(key.removeprefix("tpu"))
        theirs, ours = tpu_info.get_tpu_info_for_chip(version, cores), chip(key)
        assert ours.peak("bfloat16") == pytest.approx(theirs.bf16_ops_per_second * cores, rel=0.01)
        assert ours.hbm == pytest.approx(theirs.hbm_capacity_bytes * cores, rel=0.01)


def test_gpus_use_nvlink_inside_a_node_and_the_network_between():
    assert rates("h100", data=2, model=8) == {"data": 50, "model": 450}
    assert rates("b200", data=2, model=8) == {"data": 50, "model": 900}
    assert rates("a100", data=2, fsdp=2, model=2) == {"data": 300, "fsdp": 300, "model": 300}
    assert why("h100", "model", data=2, model=8) == "NVLink 4 inside a node of 8, 450\u202fGB/s"
    expected = "InfiniBand NDR 400 Gb/s per GPU between nodes, 50\u202fGB/s"
    assert why("h100", "data", data=2, model=8) == expected


def test_members_that_share_a_node_each_have_their_adapter():
    assert rates("h100", data=16) == {"data": 8 * 50}
    assert rates("h100", data=4, model=4) == {"data": 2 * 50, "model": 450}


def test_an_axis_that_leaves_the_node_is_no_faster_than_its_link():
    assert rates("gb200", data=144) == {"data": 900}  # not 72 adapters of 50


def test_a_node_need_not_be_full():
    assert rates("h100", data=3, model=4) == {"data": 50, "model": 450}
    assert rates("gb200", data=2, model=64) == {"data": 50, "model": 900}


def test_a_cube_of_v100s_has_all_its_links_only_as_a_whole():
    assert rates("v100", data=8) == {"data": 150}
    assert rates("v100", data=4, model=2) == {"data": 25, "model": 25}


def test_what_nobody_publishes_is_none_and_says_so():
    assert rates("t4", data=2) == {"data": 15.75}
    assert rates("t4", data=16) == {"data": None}
    assert why("t4", "data", data=16) == "between nodes; no network is published for T4"
    assert rates("v2", data=8) == {"data": None}
    assert why("v2", "data", data=8).endswith("no bandwidth is published")


def test_v5e_wraps_around_at_16_chips_and_nowhere_else():
    assert rates("v5e", data=16, model=16) == {"data": 90, "model": 90}
    assert rates("v5e", data=4, model=4) == {"data": 45, "model": 45}
    assert rates("v5e", data=8, model=16) == {"data": 45, "model": 90}
    assert why("v5e", "data", data=16, model=16) == "ICI ring, both directions, 90\u202fGB/s"
    expected = "ICI line, one direction: slice 4x4 does not wrap around there, 45\u202fGB/s"
    assert why("v5e", "data", data=4, model=4) == expected


def test_v5p_wraps_around_in_whole_cubes():
    assert rates("v5p", data=4, fsdp=4, model=4) == {"data": 180, "fsdp": 180, "model": 180}
    assert rates("v5p", (2, 2, 4), data=4, model=4) == {"data": 90, "model": 180}  # 4; 2x2
    assert rates("v5p", data=2, model=2) == {"data": 90, "model": 90}


def test_an_axis_over_several_dimensions_has_the_links_of_all():
    assert rates("v5e", data=16) == {"data": 2 * 45}
    assert rates("v5e", data=256) == {"data": 2 * 90}
    assert rates("v5p", data=64) == {"data": 6 * 90}


def test_axes_that_split_a_dimension_have_one_link_or_share_it():
    # 4x4: of each line of four, the inner pairs are neighbours, the outer ones two chips apart.
    assert rates("v5e", a=2, b=2, c=2, d=2) == {"a": 22.5, "b": 45, "c": 22.5, "d": 45}
    assert rates("v5e", data=8, model=2) == {"data": 45, "model": 45}


def test_the_devices_of_a_chip_share_its_links():
    assert rates("tpu7x", data=64, model=2) == {"data": 6 * 100 / 2, "model": 600}
    assert rates("tpu7x", data=128) == {"data": 6 * 100}
    assert rates("v3", data=4, model=2) == {"data": 100, "model": 50}  # y and the cores; x


def test_between_slices_goes_the_network():
    assert rates("v5e", data=2, model=256) == {"data": 3.125, "model": 180}
    assert rates("v5e", (4, 4), data=4, model=8) == {"data": 2 * 3.125, "model": 45}
    assert axis_links(chip("v5e"), {"data": 2, "model": 256})["data"].name == "DCN"


def test_a_part_of_an_axis_has_the_links_of_its_dimensions():
    """v5p has 90 GB/s a link and direction, both directions in a whole cube: 180 for each dimension."""
    wire = axis_links(chip("v5p"), {"data": 64}, (4, 4, 4))["data"]
    assert wire.sub_ring(4, 1).bandwidth == 180 * GB  # near devices: a line
    assert wire.sub_ring(16, 4).bandwidth == 360 * GB  # far ones: a plane
    assert wire.sub_ring(64, 1).bandwidth == wire.bandwidth == 540 * GB
    assert axis_links(chip("h100"), {"data": 8})["data"].sub_ring(4, 2).bandwidth == 450 * GB  # a switch


def test_a_topology_that_cannot_be_says_what_can():
    assert refusal(axis_links, chip("h100"), {"data": 4}, (2, 2)).startswith("topology 2x2: H100 has no")
    assert refusal(axis_links, chip("v5e"), {"data": 8}, (2, 2, 2)).endswith("2 dimensions, as 4x4")
    assert "which has 16" in refusal(axis_links, chip("v5e"), {"data": 4}, (4, 4))


@each_chip
@pytest.mark.parametrize("sizes", [(1,), (3,), (8,), (2, 3), (6, 4), (5, 7, 2), (16, 8, 3), (2, 20000)])
def test_every_mesh_gets_an_answer(row, sizes):
    axes = {f"axis{i}": n for i, n in enumerate(sizes)}
    wires = axis_links(row, axes)
    assert list(wires) == list(axes)
    assert all(w.name and w.description and (w.bandwidth is None or w.bandwidth > 0) for w in wires.values())


def test_an_axis_of_one_sends_nothing():
    assert rates("h100", data=1, model=8) == {"data": None, "model": 450}
    assert rates("v5e", data=1) == {"data": None}
