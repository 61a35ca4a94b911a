"""What a comparison tries: strategies on meshes that serve them, options in every combination, and the line of each."""

import pytest
from jax.sharding import Mesh
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.search import Candidate, RefusedCandidate, Requests, candidates, parse_vary


def devices(text: str) -> Mesh:
    return jaxshard_magic.mesh(f"cpu:8 {text}")


def tried(mesh: str, *strategies: str, **given) -> dict[str, dict[str, int]]:
    return {c.line: dict(c.mesh.shape) for c in candidates(Requests(strategies, devices(mesh), **given))}


def test_a_strategy_takes_the_mesh_or_another_of_its_devices_that_serves_it():
    assert tried("data=4 model=2", "fsdp+tp", "dp", "tp", "pp") == {
        'fsdp+tp --mesh "data=4 model=2"': {"data": 4, "model": 2},
        'dp --mesh "data=8"': {"data": 8},  # the model axis would be idle
        'tp --mesh "data=4 model=2"': {"data": 4, "model": 2},  # the batch is divided over data
        'pp --mesh "pipe=4 data=2"': {"pipe": 4, "data": 2},
    }
    assert tried("fsdp=8", "fsdp@fsdp") == {'fsdp@fsdp --mesh "fsdp=8"': {"fsdp": 8}}


def test_all_meshes_are_every_division_of_the_devices_over_the_axes():
    found = candidates(Requests(["fsdp+tp", "dp", "pp+fsdp+tp"], devices("data=8"), meshes="all"))
    sizes = {}
    for each in found:
        assert isinstance(each, Candidate)
        sizes.setdefault(each.strategy, []).append(tuple(each.mesh.shape.values()))
    assert sizes == {"fsdp+tp": [(2, 4), (4, 2)], "dp": [(8,)], "pp+fsdp+tp": [(2, 2, 2)]}


def test_options_vary_in_every_combination_and_pipelines_only_in_pipelines():
    found = tried("data=8", "dp", "pp", vary={"microbatches": [4, 8], "schedule": ["gpipe", "1f1b"]})
    assert [line.replace(' --mesh "data=8"', "").replace(' --mesh "pipe=4 data=2"', "") for line in found] == [
        "dp --microbatches 4",
        "dp --microbatches 8",
        "pp --microbatches 4 --schedule gpipe",
        "pp --microbatches 4 --schedule 1f1b",
        "pp --microbatches 8 --schedule gpipe",
        "pp --microbatches 8 --schedule 1f1b",
    ]
    assert parse_vary(["remat=none,full", "reduce-dtype=bf16"]) == {
        "remat": [None, "full"],
        "reduce_dtype": ["bf16"],
    }


def test_what_every_candidate_is_given_is_in_its_line():
    (line,) = tried("data=8", "fsdp", options={"precision": "bf16", "schedule": "1f1b", "remat": None})
    assert line == 'fsdp --mesh "data=8" --precision bf16'


def test_a_combination_that_can_not_be_is_refused_alone():
    one, other = candidates(Requests(["pp"], devices("data=8"), vary={"microbatches": [1, 8]}))
    assert isinstance(one, RefusedCandidate)
    assert "one stage of the pipeline would work at a time" in one.why
    assert isinstance(other, Candidate)


@pytest.mark.parametrize(
    ("strategies", "given", "said"),
    [
        (["dp", "fsd"], {}, "their sums. --keep-going compares the others"),
        (["dp"], {"vary": {"name": ["a"]}}, "what varies is one of microbatches, reduce"),
        (["dp"], {"meshes": ["data=4"]}, "takes 4 devices; this comparison is on 8"),
        (["dp"], {"meshes": ["v5e:2x4 data=8"]}, "name them once"),
        ([], {}, "nothing to compare"),
        (
            ["dp", "fsdp", "fsdp+tp"],
            {"meshes": "all", "vary": {"microbatches": range(1, 31)}},
            "120 candidates (3 strategies x every mesh of them x 30 of microbatches), and at most 64",
        ),
        (
            ["dp"],
            {"meshes": "data=4 model=2", "vary": {"microbatches": range(1, 81)}},
            "80 candidates (1 strategy x 1 mesh x 80 of microbatches), and at most 64",
        ),
    ],
)
def test_what_can_not_be_compared_is_refused_before_anything_is_traced(strategies, given, said):
    assert said in refusal(lambda: candidates(Requests(strategies, devices("data=8"), **given)))


def test_with_keep_going_a_strategy_that_is_none_is_a_row():
    one, other = candidates(Requests(["fsd", "dp"], devices("data=8"), keep_going=True))
    assert isinstance(one, RefusedCandidate)
    assert isinstance(other, Candidate)


def test_stages_that_the_devices_do_not_make_are_a_row_that_says_so():
    rows = candidates(Requests(("pp",), jaxshard_magic.mesh("data=8"), vary={"stages": [3, 16]}))
    assert ["8 devices make no such stages" in row.why for row in rows if isinstance(row, RefusedCandidate)] == [
        True
    ] * 2
