"""Slices and nodes: the sizes that are offered, what is said of others, and how they are written."""

import doctest
import math

import pytest
from support.refusals import refusal

from jaxshard_magic.hardware import chip, chips
from jaxshard_magic.targets import slices
from jaxshard_magic.targets.slices import (
    is_offered,
    list_chips,
    parse_extent,
    parse_vendor_name,
    size_note,
    usual_sizes,
)

TPUS = [c.key for c in chips().values() if c.kind == "tpu"]
GPUS = [c.key for c in chips().values() if c.kind == "gpu"]
FLAT = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]


def sold(text: str) -> tuple[str, tuple[int, ...]]:
    found = parse_vendor_name(text)
    assert found is not None
    return found[0].key, found[1]


@pytest.mark.parametrize("key", ["v5e", "v6e"])
def test_flat_slices_are_those_of_the_published_table(key):
    # https://cloud.google.com/tpu/docs/v5e and v6e: topologies with 1 to 256 chips
    assert list(usual_sizes(chip(key))) == FLAT


# https://cloud.google.com/tpu/docs/v5p: topology, cores, chips
V5P = [
    ((2, 2, 1), 8, 4),
    ((2, 2, 2), 16, 8),
    ((2, 4, 4), 64, 32),
    ((4, 4, 4), 128, 64),
    ((4, 4, 8), 256, 128),
    ((4, 8, 8), 512, 256),
    ((8, 8, 8), 1024, 512),
    ((8, 8, 16), 2048, 1024),
    ((8, 16, 16), 4096, 2048),
    ((16, 16, 16), 8192, 4096),
    ((16, 16, 24), 12288, 6144),
]


@pytest.mark.parametrize(("extent", "cores", "count"), V5P)
def test_a_v5p_is_sold_by_cores_and_written_by_chips(extent, cores, count):
    assert extent in usual_sizes(chip("v5p"))
    assert sold(f"v5p-{cores}") == ("v5p", extent)
    assert parse_extent(chip("v5p"), str(count)) == extent


@pytest.mark.parametrize(
    ("name", "key", "extent"),
    [
        ("v2-8", "v2", (2, 2)),
        ("v2-512", "v2", (16, 16)),
        ("v3-8", "v3", (2, 2)),
        ("v3-2048", "v3", (32, 32)),
        ("v4-8", "v4", (2, 2, 1)),
        ("v4-64", "v4", (2, 4, 4)),
        ("v4-4096", "v4", (8, 16, 16)),
        ("v5litepod-1", "v5e", (1, 1)),
        ("v5litepod-16", "v5e", (4, 4)),
        ("v5e-256", "v5e", (16, 16)),
        ("v6e-8", "v6e", (2, 4)),
        ("tpu7x-8", "tpu7x", (2, 2, 1)),
        (" V5LitePod-4 ", "v5e", (2, 2)),
    ],
)
def test_a_slice_is_known_by_the_name_it_is_sold_by(name, key, extent):
    assert sold(name) == (key, extent)


# Cubes that are sold beside those of the page, as XPK names them by cores.
CUBES = [
    (384, (4, 4, 12)),
    (1536, (8, 8, 12)),
    (1792, (4, 8, 28)),
    (3456, (12, 12, 12)),
    (5632, (8, 8, 44)),
    (12160, (4, 20, 76)),
]


@pytest.mark.parametrize(("cores", "extent"), CUBES)
def test_of_cubes_the_most_even_slice_is_the_one_of_that_name(cores, extent):
    assert sold(f"v5p-{cores}") == ("v5p", extent)
    assert size_note(chip("v5p"), extent) is None


@pytest.mark.parametrize("text", ["a100-80", "h100-80", "v100-32", "data=4", "v5e:16", "v5p", "banana-8"])
def test_other_names_are_none_of_a_slice(text):
    assert parse_vendor_name(text) is None


@pytest.mark.parametrize("key", TPUS)
def test_the_usual_slices_rise_to_the_largest_there_are(key):
    counts = [math.prod(extent) for extent in usual_sizes(chip(key))]
    assert counts == sorted(set(counts))
    assert counts[-1] <= chip(key).node // chip(key).per_chip
    assert len({len(extent) for extent in usual_sizes(chip(key))}) == 1
    assert all(
        is_offered(chip(key), extent) and size_note(chip(key), extent) is None for extent in usual_sizes(chip(key))
    )


def test_a_size_that_nobody_offers_is_told_with_the_nearest():
    assert size_note(chip("v5e"), (3, 5)) == (
        "v5e:3x5 is no slice that is offered; the nearest are v5e:4x4 and v5e:2x4; compiled all the same"
    )
    assert "the nearest is v5e:2x4;" in str(size_note(chip("v5e"), (4, 2)))
    assert "the nearest is v5p:4x4x8;" in str(size_note(chip("v5p"), (8, 4, 4)))
    assert "v5p:16x16x24 and" in str(size_note(chip("v5p"), (20, 20, 20)))  # 8000 chips; 6144 are the most


def test_where_a_chip_is_two_devices_both_are_told():
    assert "v3:4x4 (32 devices) and v3:2x2 (8 devices)" in str(size_note(chip("v3"), (3, 3)))
    assert "no slice of 7 chips (14 devices)" in refusal(parse_vendor_name, "v3-14")
    assert "devices" not in str(size_note(chip("v5e"), (3, 3)))


def test_a_three_dimensional_slice_may_leave_ones_out():
    assert parse_extent(chip("v5p"), "2x2x1") == parse_extent(chip("v5p"), "2x2") == (2, 2, 1)
    assert parse_extent(chip("v5e"), "4x4x1") == (4, 4)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("v5e", "2x2x2", "'v5e:2x2x2' has 3 dimensions"),
        ("v5e", "15", "no slice of 15 chips is offered; the nearest are v5e:4x4 and v5e:2x4"),
        ("v5e", "banana", "as v5e:4x4, or by its chips"),
        ("v5p", "0x4x4", "as v5p:4x4x4"),
        ("v5p", "-4", "as v5p:4x4x4"),
        ("h100", "12", "a node has 8"),
        ("h100", "2x2x2", "as h100:2x8"),
        ("h100", "", "as h100:8"),
    ],
)
def test_what_is_no_size_says_how_one_is_written(key, text, said):
    assert said in refusal(parse_extent, chip(key), text)


def test_an_odd_number_of_cores_is_no_slice():
    assert "counts cores" in refusal(parse_vendor_name, "v5p-7")
    assert "nearest are v5p:4x4x4 and v5p:2x4x4" in refusal(parse_vendor_name, "v5p-100")


def test_gpus_come_in_nodes():
    assert usual_sizes(chip("h100")) == ((1, 1), (1, 2), (1, 4), (1, 8))
    assert parse_extent(chip("h100"), "8") == (1, 8)
    assert parse_extent(chip("h100"), "32") == parse_extent(chip("h100"), "4x8") == (4, 8)
    assert size_note(chip("h100"), (4, 8)) is size_note(chip("gb200"), (1, 72)) is None
    assert size_note(chip("h100"), (1, 3)) == (
        "h100:3 has 3 GPUs a node; a node of H100 has 1, 2, 4, 8; compiled all the same"
    )


def test_the_list_has_every_chip_in_aligned_lines_under_100_characters():
    lines = list_chips().splitlines()
    assert max(map(len, lines)) < 100
    assert {line.split()[0] for line in lines if line.strip()} >= {*TPUS, *GPUS}
    for keys in (TPUS, GPUS):
        rows = [line for line in lines if line.split()[:1] and line.split()[0] in keys]
        assert len({line.index("\u202fGiB") for line in rows}) == 1


def test_the_list_tells_memory_sizes_devices_and_what_to_install():
    rows = {line.split()[0]: line for line in list_chips().splitlines() if line.strip()}
    assert rows["v5e"].split()[1:5] == ["16", "GiB", "15.75", "GiB"]
    assert "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16" in rows["v5e"]
    assert "whole 4x4x4 cubes to 6,144" in rows["v5p"]
    assert "2 a chip" in rows["tpu7x"]
    assert "the extra tpu" in list_chips() and "the extra cuda-aot" in list_chips()


def test_a_chip_that_nothing_compiles_for_is_marked(monkeypatch):
    from dataclasses import replace

    known = {"t4": replace(chip("t4"), compiler=None), "l4": chip("l4"), "v5e": chip("v5e")}
    monkeypatch.setattr(slices, "chips", lambda: known)
    rows = {line.split()[0]: line for line in list_chips().splitlines() if line.strip()}
    assert "not compiled for" in rows["t4"]
    assert "not compiled for" not in rows["l4"]


def test_the_examples_run():
    assert doctest.testmod(slices).failed == 0
