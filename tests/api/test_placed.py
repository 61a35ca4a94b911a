"""`layout(x)` and `show(x)`: how any arrays lie, held against what jax itself says of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from IPython.utils.capture import capture_output
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import jaxshard_magic
from jaxshard_magic import ShardError, layout
from jaxshard_magic.report import Leaf, MeshInfo
from jaxshard_magic.report.device_leaves import devices_per_axis
from jaxshard_magic.report.parts import dim_axes
from jaxshard_magic.views.format import SPACE

P = PartitionSpec
SHAPE = (16, 8)


def mesh(names: str = "data model", sizes: tuple[int, ...] = (4, 2), first: int = 0) -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(sizes), tuple(names.split()))


def starts(leaf: Leaf, info: MeshInfo) -> dict[int, tuple[int, ...]]:
    """Where the slice of each device begins, as a Leaf says it: worked out one device after the other."""
    cut, found = dim_axes(leaf.spec, len(leaf.shape)), {}
    sizes = devices_per_axis(leaf, info.axes)
    for place, device in enumerate(info.devices):
        at, rest = {}, place
        for axis, size in reversed(info.axes.items()):
            rest, at[axis] = divmod(rest, size)
        if any(not first <= at[axis] < end for axis, (first, end) in leaf.within.items()):
            continue
        begins = []
        for size, axes in zip(leaf.shape, cut, strict=True):
            index, blocks = 0, 1
            for axis in axes:
                index = index * sizes[axis] + at[axis] - leaf.within.get(axis, (0, 0))[0]
                blocks *= sizes[axis]
            begins.append(index * (size // blocks))
        found[device] = tuple(begins)
    return found


def placed(sharding: Sharding) -> Any:
    """An array laid out so, beside one that lies on the whole mesh data=4 model=2."""
    x = jax.device_put(jnp.zeros(SHAPE), sharding)
    return {"whole": jax.device_put(jnp.zeros(8), NamedSharding(mesh(), P())), "x": x}


@pytest.mark.parametrize(
    "sharding",
    [
        lambda: NamedSharding(mesh(), P("data", "model")),
        lambda: NamedSharding(mesh(), P(None, ("model", "data"))),
        lambda: NamedSharding(mesh(), P()),
        lambda: NamedSharding(mesh("d", (8,)), P("d")),
        lambda: NamedSharding(mesh("d m", (2, 2), first=4), P("d", "m")),
        lambda: SingleDeviceSharding(jax.devices()[5]),
    ],
    ids=["both", "one dimension", "whole", "other axes", "a part of the devices", "one device"],
)
def test_what_is_told_of_an_array_is_what_jax_says_of_each_device(sharding: Callable[[], Sharding]):
    value = placed(sharding())
    report, shards = layout(value), value["x"].addressable_shards
    assert report.mesh.axes == {"data": 4, "model": 2} and not report.advice
    leaf = next(leaf for leaf in report.leaves if leaf.path == "x")
    assert starts(leaf, report.mesh) == {s.device.id: tuple(p.start or 0 for p in s.index) for s in shards}
    assert leaf.bytes_per_device == shards[0].data.nbytes and leaf.bytes == value["x"].nbytes


@pytest.mark.parametrize(
    "sharding",
    [
        lambda: NamedSharding(mesh("d m", (2, 4)), P("m", "d")),
        lambda: NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("d",)), P("d")),
        lambda: NamedSharding(mesh("d", (3,)), P()),
    ],
    ids=["other axes", "devices in another order", "devices that are no part of the mesh"],
)
def test_what_no_spec_of_the_mesh_tells_is_said_and_not_drawn(sharding: Callable[[], Sharding]):
    report = layout(placed(sharding()))
    assert [leaf.path for leaf in report.leaves] == ["whole"]
    (said,) = report.advice
    assert said.message.startswith("x is cut along none of these axes, and left out: NamedSharding(")


def test_arrays_of_any_kind_of_value_have_their_paths():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    assert {leaf.path for leaf in layout(model, name="model").leaves} == {"model.kernel", "model.bias"}
    value = {"w": [jnp.ones(2)], "key": jax.random.key(0), "step": 3, "host": np.ones(2)}
    report = layout(value)
    assert {leaf.path: leaf.role for leaf in report.leaves} == {"w.0": "other", "key": "rng"}
    assert [a.message.partition(" (")[0] for a in report.advice] == ["1 array lies on no device"]
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh(), P("data")))
    assert layout(shape).leaves[0].bytes_per_device == 2 * 16 * 8 // 4


def test_an_array_whose_memory_is_gone_says_so():
    x = jnp.ones(4)
    x.delete()
    assert layout(x).leaves[0].why == "deleted: its memory was donated to a call, or freed"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "x is of type dict and holds no arrays; give a jax.Array or a pytree of them"),
        (np.ones(3), "x is of type ndarray and holds arrays, but none of them on a device; "),
    ],
)
def test_what_lies_on_no_device_is_one_line(value: Any, said: str):
    with pytest.raises(ShardError) as error:
        jaxshard_magic.show(value)
    assert str(error.value).startswith(said)


def test_inside_a_jitted_function_it_is_one_line():
    with pytest.raises(ShardError, match="being traced lies nowhere yet: show it outside of the jitted function"):
        jax.jit(layout)(jnp.ones(3))


def test_the_views_tell_the_bytes_and_nothing_of_a_step(capsys: pytest.CaptureFixture[str]):
    value = placed(NamedSharding(mesh(), P("data", "model")))
    jaxshard_magic.show(value)
    text = capsys.readouterr().out.replace(SPACE, " ")
    assert text.startswith("arrays   data=4 model=2   8 simulated CPU devices")
    assert "2 arrays, 544 B together; each device holds 96 B. Whole on every device: 1 of" in text
    for step in ("step", "not run", "peak", "compile"):
        assert step not in text and step not in layout(value).to_html()


def test_in_a_notebook_it_is_shown_at_once_and_once(notebook):
    notebook.shell.user_ns["x"] = jnp.ones(4)
    notebook.shell.kernel = object()
    with capture_output() as captured:
        notebook.run("import jaxshard_magic\njaxshard_magic.show(x)\nNone")
        notebook.run("jaxshard_magic.show(jaxshard_magic.layout(x))")
    kinds = ["application/vnd.jupyter.widget-view+json" in output.data for output in captured.outputs]
    assert kinds == [True, False, True, False]
