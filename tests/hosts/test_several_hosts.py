"""Steps on a mesh over several processes, without a controller: the numbers of one process, and data of each host."""

import re
from math import prod
from typing import Any

import pytest
from safetensors.numpy import load_file
from support import several_hosts
from support.pages import ROOT

pytestmark = pytest.mark.ci

AXES: list[list[Any]] = [
    ["train", "dp", "data=8", {}],
    ["train", "fsdp", "data=8", {}],
    ["train", "tp", "model=8", {}],
    ["train", "fsdp+tp", "data=4 model=2", {}],
    ["train_positions", "dp+sp", "data=2 seq=4", {}],
]
CASES: list[list[Any]] = [
    *AXES,
    ["train", "spmd", "data=8", {"specs": {"batch": "P('data')"}}],
    ["train", "fsdp", "data=8", {"microbatches": 2, "remat": "full"}],
    ["train", "fsdp", "data=8", {"precision": "bf16"}],
    ["train_nnx", "fsdp", "data=8", {}],
    ["train_linen", "dp", "data=8", {}],
    ["train_equinox", "fsdp", "data=8", {}],
    ["train_mapped", "pmap", "data=8", {}],
]
# By hand: of the groups over an axis how many go from a host to another one, and how many members of each are together.
# Devices lie in order, the last axis fastest; over all axes there is one group, with all of a host's devices.
LEAVE: dict[tuple[int, str], dict[str, tuple[int, int]]] = {
    **{(hosts, axes): {} for hosts in (2, 4) for axes in ("data=8", "model=8")},
    (2, "data=4 model=2"): {"model": (0, 2), "data": (2, 2)},
    (4, "data=4 model=2"): {"model": (0, 2), "data": (2, 1)},
    (2, "data=2 seq=4"): {"seq": (0, 4), "data": (4, 1)},
    (4, "data=2 seq=4"): {"seq": (1, 2), "data": (2, 1)},
}
PER_HOST = {"data": "per-host"}
DATA: list[list[Any]] = [
    ["whole", "data=8", "fsdp", {}],
    ["parts", "data=8", "fsdp", {}],
    ["parts", "data=8", "fsdp", {**PER_HOST, "check": True}],
    ["same", "data=8", "fsdp", PER_HOST],
    ["weights", "data=8", "fsdp", {}],
    ["parts", "model=8", "tp", PER_HOST],
    ["parts", "data=4 model=2", "fsdp+tp", {**PER_HOST, "microbatches": 2}],
    ["parts", "data=8", "dp", {**PER_HOST, "pad": True}],
    ["whole", "data=2", "dp", {}],
    ["whole", "data=3", "dp", {}],
    ["whole", "pipe=2 data=4", "pp", {}],
    ["whole", "data=8", "pp", {}],
    ["fewer", "data=8", "fsdp", PER_HOST],
]
FED: list[list[Any]] = [
    ["whole", "fsdp", "data=8", {}],
    ["parts", "fsdp", "data=8", PER_HOST],
    ["parts", "fsdp+tp", "data=4 model=2", PER_HOST],
    ["whole", "tp", "model=8", {}],
]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return several_hosts.run("support.hosts_steps:several", CASES, hosts=1)[0]


@pytest.mark.parametrize(
    ("hosts", "cases"),
    [
        (2, CASES),
        pytest.param(4, AXES, marks=pytest.mark.full),
        pytest.param(4, CASES, marks=pytest.mark.full),
    ],
    ids=["2", "4", "4, all cases"],
)
def test_a_step_on_several_hosts_has_the_numbers_and_the_moves_of_one(
    alone: list[dict[str, Any]], hosts: int, cases: list[list[Any]]
):
    """What leaves a host depends on the axes alone: four hosts have the other cases where all rows run."""
    found = several_hosts.run("support.hosts_steps:several", cases, hosts=hosts)
    for case, one, *several in zip(cases, alone[: len(cases)], *found, strict=True):
        for each in several:
            assert each["losses"] == pytest.approx(one["losses"], rel=1e-5), case
            assert each["sum"] == pytest.approx(one["sum"], rel=1e-5), case
            assert each["passed"] and each["processes"] == hosts, case
            assert each["moved"] == one["moved"], case
        (first, *others), axes = several, case[2]
        assert all(each["left"] == first["left"] for each in others)
        assert one["left"] == [None] * len(one["left"]), "one host has no others"
        for (kind, over, whole, sent), left in zip(first["moved"], first["left"], strict=True):
            groups, members = LEAVE[hosts, axes].get(" ".join(over), (1, 8 // hosts))
            size = prod(int(part.partition("=")[2]) for part in axes.split() if part.partition("=")[0] in over)
            parts = members * (size - members) / size * whole
            assert left == pytest.approx(groups * (parts if kind == "all-to-all" else sent), abs=8), (
                case,
                kind,
            )


@pytest.fixture(scope="module")
def data() -> list[dict[str, Any]]:
    first, second = several_hosts.run("support.hosts_steps:all_data", DATA)
    assert first == second, "hosts say the same"
    return first


def test_each_host_places_its_rows_of_a_batch_that_all_have_or_has_a_part_of_it(data: list[dict[str, Any]]):
    whole = data[0]["losses"]
    for i in (2, 5, 6, 7, 8):
        assert data[i]["losses"] == pytest.approx(whole, rel=1e-5), DATA[i]


def test_different_rows_are_refused_with_the_option_that_takes_them(data: list[dict[str, Any]]):
    assert data[1]["fix"] == "--data per-host"
    assert data[1]["error"].startswith("train_step: batch.x is not the same on all 2 hosts.")
    assert data[4]["error"].startswith("train_step: state.0.up is not the same on all 2 hosts.")


def test_fewer_rows_on_one_host_are_refused_with_both_sizes(data: list[dict[str, Any]]):
    sizes = "train_step: batch.x is float32[8, 32] on host 0 and float32[6, 32] on host 1."
    assert data[12]["error"].startswith(sizes)


def test_a_fed_loop_has_the_plain_numbers_whichever_host_is_first():
    first, second = several_hosts.run("support.hosts_steps:all_fed", FED)
    for case, one, other in zip(FED, first, second, strict=True):
        assert one["fed"] == one["plain"] == other["fed"], case
        assert one["programs"] == other["programs"] == 2, case  # the second is for all numbers
        assert one["kinds"][1] and not other["kinds"][1] and other["kinds"][-1], case


def test_equal_rows_that_count_for_each_host_are_a_warning(data: list[dict[str, Any]]):
    (said,) = data[3]["advice"]
    assert "every example counts 2 times" in said


def test_a_mesh_takes_as_many_devices_of_each_host_and_no_pipeline(data: list[dict[str, Any]]):
    assert "takes as many of each" in data[9]["error"]
    for piped in data[10:12]:
        assert piped["error"].startswith("pp on 2 hosts: "), "and no other mesh is advised, which would be refused"


def test_comparing_and_choosing_end_alike_on_all_hosts():
    first, second = several_hosts.run("support.hosts_steps:searched")
    assert first == second
    assert [row[:2] for row in first["rows"]] == [["dp", True], ["fsdp", True], ["tp", True], ["pp", False]]
    assert first["losses"][0] > first["losses"][-1]


# Who puts arrays on devices beside `placing`: pipelines, which are of one host; the doctor and the demo, which have
# arrays of their own; what `codegen/wrappers.py` writes into the user's program; `simulate`, whose backend ends;
# `program/memory_kinds.py`, inside of a trace.
ELSEWHERE = (
    "device_arrays.py",
    "pipeline/",
    "doctor/",
    "demo.py",
    "codegen/wrappers.py",
    "program/memory_kinds.py",
    "simulate.py",
    "targets/",
)


def test_arrays_are_put_on_devices_in_one_place():
    package = ROOT / "jaxshard_magic"
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        if not str(path.relative_to(package)).startswith(ELSEWHERE)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(device_put|device_get)\(", line) and not re.search(r'["`#].*device_(put|get)', line)
    ]
    assert found == []


def test_hosts_write_a_file_of_weights_together_and_each_reads_its_parts(tmp_path):
    first, second = several_hosts.run("support.hosts_steps:weights_of_hosts", str(tmp_path))
    assert first[0] == second[0] == "same"
    assert load_file(tmp_path / "w.safetensors")["fc.weight"].shape == (128, 256)
    assert first[1] == second[1] and "host 1: there is no " in first[1]
    assert "w.safetensors is there already" in first[2] and "is there already" in second[2]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "w.safetensors"]
