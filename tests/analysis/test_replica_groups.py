"""Groups of devices in any form in which XLA writes them, over any axes of any mesh."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mesh_draws import meshes_and_axes

from jaxshard_magic.analysis.collectives import module_collectives, replica_groups
from jaxshard_magic.analysis.hlo import parse_module

BYTES = 16 * 8 * 4

GROUPS_BY_DATA = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", GROUPS_BY_DATA),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[2,4]<=[4,2]T(1,0)", GROUPS_BY_DATA),
        ("mesh['data'=4,'model'=2] {'data'}", GROUPS_BY_DATA),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", GROUPS_BY_DATA),
        ("mesh[a=4,b=2] {b,a}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a'}", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([[3,1],[0,2]]) {'b'}", ((3, 1), (0, 2))),
        ("{}", ()),
    ],
)
def test_replica_groups_read_in_all_their_forms(text, groups):
    got = replica_groups(text)
    assert {frozenset(g) for g in got} == {frozenset(g) for g in groups}
    assert len(got) == len(groups)


def reduced_over(groups: str, devices: int = 8) -> str:
    return f"""HloModule m, num_partitions={devices}

ENTRY %main (p: f32[16,8]) -> f32[16,8] {{
  %p = f32[16,8]{{1,0}} parameter(0)
  ROOT %r = f32[16,8] all-reduce(%p), replica_groups={groups}, use_global_device_ids=true, to_apply=%sum
}}
"""


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{}", ("data", "model"), 8),
        ("[1,8]<=[8]", ("data", "model"), 8),
        ("[4,2]<=[8]", ("model",), 2),
        ("mesh['x'=8] {'x':(1)4}", ("data",), 4),
        ("mesh['x'=4,'y'=2], device_ids=([4,2]T(1,0)) {'y'}", ("data",), 2),
    ],
)
def test_groups_of_any_form_become_mesh_axes(groups, axes, size):
    (got,) = module_collectives(parse_module(reduced_over(groups)), {"data": 4, "model": 2})
    assert (got.axes, got.group_size, got.bytes) == (axes, size, BYTES)


def written(axes: dict[str, int], chosen: tuple[str, ...], form: str, shuffle) -> str:
    shape, names = tuple(axes.values()), list(axes)
    order = [i for i, a in enumerate(names) if a not in chosen] + [names.index(a) for a in chosen]
    size = math.prod(axes[a] for a in chosen)
    if form == "mesh":
        sizes, listed = (",".join(f"'{a}'={n}" for a, n in axes.items())), ",".join(f"'{a}'" for a in chosen)
        return f"mesh[{sizes}] {{{listed}}}"
    if form == "iota":
        count = math.prod(shape) // size
        return f"[{count},{size}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    rows = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1, size).tolist()
    groups = [shuffle(row) for row in shuffle(rows)]
    return "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


@given(meshes_and_axes(), st.sampled_from(["mesh", "iota", "list"]), st.randoms())
def test_groups_over_any_axes_of_any_mesh_are_recognised(mesh_and_axes, form, random):
    axes, chosen = mesh_and_axes

    def shuffle(rows):
        return random.sample(rows, len(rows))

    groups = written(axes, chosen, form, shuffle)
    text = reduced_over(groups, math.prod(axes.values()))
    expected = tuple(a for a in chosen if axes[a] > 1)
    got = [(m.axes, m.group_size) for m in module_collectives(parse_module(text), axes)]
    assert got == ([(expected, math.prod(axes[a] for a in expected))] if expected else [])
