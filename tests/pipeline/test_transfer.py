"""Arrays go from rank to rank: the same values, laid out as asked, at a price that doesn't grow with what is known."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxshard_magic.pipeline import transfer
from jaxshard_magic.pipeline.transfer import ArrayTransfer

DEVICES = jax.devices()
VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)


def on(devices, *spec, shape=None, names=("data", "model")):
    """A sharding over the devices with these numbers."""
    grid = np.array([DEVICES[i] for i in devices]).reshape(shape or (len(devices),))
    return NamedSharding(Mesh(grid, names[: grid.ndim]), PartitionSpec(*spec))


def alone(device):
    return SingleDeviceSharding(DEVICES[device])


PLACES = {
    "one device to another": (alone(0), alone(1)),
    "a mesh of one to a device": (on([0], "data"), alone(3)),
    "a device to a mesh of one": (alone(0), on([3], "data")),
    "a mesh of one to another": (on([0], "data"), on([5], "data")),
    "two devices to two others": (on([0, 1], "data"), on([2, 3], "data")),
    "four devices in a grid": (
        on([0, 1, 2, 3], "data", "model", shape=(2, 2)),
        on([4, 5, 6, 7], "data", "model", shape=(2, 2)),
    ),
    "replicated": (on([0, 1]), on([2, 3])),
    "other names of axes": (on([0, 1], "data"), on([2, 3], "rows", names=("rows",))),
    "rows become columns": (on([0, 1], "data"), on([2, 3], None, "data")),
    "rows become columns of other names": (on([0, 1], "data"), on([2, 3], None, "b", names=("b",))),
    "rows become columns in place": (on([0, 1], "data"), on([0, 1], None, "data")),
    "rows become whole": (on([0, 1], "data"), on([2, 3])),
    "whole becomes rows": (on([0, 1]), on([2, 3], "data")),
    "a line becomes a grid": (on([0, 1, 2, 3], "data"), on([4, 5, 6, 7], "data", "model", shape=(2, 2))),
    "the devices in another order": (on([0, 1], "data"), on([1, 0], "data")),
    "the same devices under another mesh": (on([0, 1], "data"), on([0, 1], "rows", names=("rows",))),
    "devices in common": (on([0, 1], "data"), on([1, 2], "data")),
    "columns on devices in common": (on([0, 1], "data"), on([1, 2], None, "data")),
    "a device to all of four": (alone(0), on([0, 1, 2, 3])),
    "a device to rows of four": (alone(0), on([0, 1, 2, 3], "data")),
    "four to one": (on([0, 1, 2, 3], "data"), alone(4)),
    "four alike to one": (on([0, 1, 2, 3]), alone(4)),
    "four to two": (on([0, 1, 2, 3], "data"), on([4, 5], None, "data")),
    "two alike to four": (on([0, 1]), on([4, 5, 6, 7])),
}
# A device or several, alike or cut, the same again, apart or some in common.
SOME = {
    "rows become columns",
    "whole becomes rows",
    "a line becomes a grid",
    "devices in common",
    "four to one",
    "a device to rows of four",
}
MOVES = {name: pair for name, pair in PLACES.items() if not pair[0].is_equivalent_to(pair[1], VALUES.ndim)}


@pytest.fixture(params=["runtime", pytest.param("jax alone", marks=pytest.mark.full)])
def by(request, monkeypatch):
    """The runtime's own functions, and a jax that has none of their names."""
    if request.param == "jax alone":
        monkeypatch.setattr(transfer, "_runtime", None)
    return request.param


@pytest.fixture(params=[False, True], ids=["any arrays", "of programs"])
def of_programs(request):
    return request.param


@pytest.mark.parametrize(("source", "target"), PLACES.values(), ids=PLACES)
def test_values_and_shardings_arrive_at_every_call(source, target, by, of_programs):
    route = ArrayTransfer([target], from_programs=of_programs)
    double = jax.jit(lambda x: x * 2)
    for k in range(3):
        x = double(jax.device_put(VALUES + k, source))
        [moved] = route([x])
        assert isinstance(moved, jax.Array)
        assert moved.sharding == target
        assert moved.committed
        assert jax.typeof(moved) == jax.typeof(jax.device_put(x, target))
        np.testing.assert_array_equal(moved, (VALUES + k) * 2)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, ((VALUES + k) * 2)[shard.index])
        np.testing.assert_array_equal(jax.jit(jnp.sin)(moved), jnp.sin((VALUES + k) * 2))


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, id=name, marks=() if name in SOME else pytest.mark.full) for name, pair in MOVES.items()],
)
def test_what_was_given_may_be_deleted_or_donated_at_once(source, target, by, of_programs):
    route = ArrayTransfer([target], from_programs=of_programs)
    spend = jax.jit(lambda x: x - 1, donate_argnums=0)
    for end in (spend, lambda x: x.delete(), spend, lambda x: x.delete()):
        x = jax.jit(lambda x: x + 0)(jax.device_put(VALUES, source))
        [moved] = route([x])
        end(x)
        np.testing.assert_array_equal(moved, VALUES)
        spend(jax.device_put(VALUES, source))
        np.testing.assert_array_equal(moved, VALUES)


@pytest.mark.parametrize("sharding", [alone(0), on([0, 1], "data")], ids=["a device", "a mesh"])
def test_what_is_there_is_not_copied(sharding):
    route = ArrayTransfer([sharding])
    for _ in range(3):
        x = jax.device_put(VALUES, sharding)
        assert route([x])[0] is x


def test_another_sharding_of_the_same_parts_shares_them():
    x = jax.device_put(VALUES, alone(0))
    route = ArrayTransfer([on([0], "data")])
    for _ in range(2):
        [moved] = route([x])
        assert moved.sharding == on([0], "data")
        assert moved.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()


def test_arrays_of_a_list_go_each_to_its_own_target():
    targets = [on([2, 3], "data"), on([0, 1], "data"), on([2, 3], None, "data"), alone(5), on([2, 3], "data")]
    route = ArrayTransfer(targets)
    for k in range(3):
        xs = [jax.device_put(VALUES + i + k, on([0, 1], "data")) for i in range(5)]
        moved = route(xs)
        assert [y.sharding for y in moved] == targets
        for i, y in enumerate(moved):
            np.testing.assert_array_equal(y, VALUES + i + k)


def test_an_empty_list_moves_nothing():
    route = ArrayTransfer([])
    assert [route([]) for _ in range(3)] == [[], [], []]


def test_more_arrays_than_targets_are_refused():
    route = ArrayTransfer([alone(1)])
    x = jax.device_put(VALUES, alone(0))
    for _ in range(2):
        with pytest.raises(ValueError, match="zip"):
            route([x, x])
        route([x])


@pytest.mark.parametrize(
    "x",
    [
        VALUES,
        3.0,
        np.float32(3),
        jnp.asarray(VALUES),
        jnp.float32(3),
        jnp.zeros((0, 4)),
        jnp.arange(3, dtype=jnp.bfloat16),
        jax.jit(lambda: 2.0)(),
    ],
    ids=["numpy", "number", "scalar of numpy", "uncommitted", "scalar", "empty", "bfloat16", "weak type"],
)
def test_anything_that_becomes_an_array_arrives(x, by):
    for target in (on([2, 3]), on([0, 1])):
        route = ArrayTransfer([target])
        for _ in range(3):
            [moved] = route([x])
            assert moved.sharding == target
            assert moved.committed
            assert jax.typeof(moved) == jax.typeof(jax.device_put(x, target))
            np.testing.assert_array_equal(moved, x)


@pytest.mark.parametrize("target", [alone(1), on([2, 3])], ids=["a device", "a mesh"])
def test_keys_of_random_numbers_arrive(target):
    route = ArrayTransfer([target])
    for k in range(3):
        [moved] = route([jax.random.key(k)])
        assert moved.sharding.is_equivalent_to(target, 0)
        np.testing.assert_array_equal(jax.random.bits(moved), jax.random.bits(jax.random.key(k)))


def test_a_changed_numpy_array_leaves_what_was_moved():
    x = VALUES.copy()
    [moved] = ArrayTransfer([alone(1)])([x])
    x[:] = 0
    np.testing.assert_array_equal(moved, VALUES)


def test_an_uncommitted_array_after_a_committed_one_arrives_committed():
    route = ArrayTransfer([alone(1)])
    for _ in range(2):
        route([jax.device_put(VALUES, alone(0))])
    assert not jnp.asarray(VALUES).committed
    assert route([jnp.asarray(VALUES)])[0].committed


def test_another_shape_type_or_place_than_the_last_arrives_as_well(of_programs):
    route = ArrayTransfer([on([2, 3], "data")], from_programs=of_programs)
    shapes = [VALUES, VALUES[:4], VALUES.astype(np.int32), VALUES, VALUES.T[:2]]
    for sharding in (on([0, 1], "data"), alone(0), on([4, 5, 6, 7])):
        for values in shapes:
            [moved] = route([jax.device_put(values, sharding)])
            assert moved.dtype == values.dtype
            assert moved.sharding == on([2, 3], "data")
            np.testing.assert_array_equal(moved, values)


def test_a_deleted_array_is_an_error_and_the_next_arrives(of_programs):
    route = ArrayTransfer([alone(1)], from_programs=of_programs)
    for _ in range(3):
        x = jax.device_put(VALUES, alone(0))
        route([x])
        x.delete()
        with pytest.raises(RuntimeError, match="deleted"):
            route([x])


def test_a_route_keeps_no_array():
    route = ArrayTransfer([alone(1), on([2, 3], "data")])
    gone = []
    for _ in range(3):
        xs = [jax.device_put(VALUES, alone(0)), jax.device_put(VALUES, on([0, 1], None, "data"))]
        gone += [weakref.ref(x) for x in (*xs, *route(xs))]
    del xs
    gc.collect()
    assert not any(x() is not None for x in gone)


@pytest.mark.ci
@pytest.mark.parametrize("target", [on([2, 3], "data"), on([2, 3], None, "data")], ids=["as it lies", "cut anew"])
def test_a_call_does_not_wait_for_the_values(target):
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, a: jnp.tanh(a @ a.T) * 0.5, x))
    source = on([0, 1], "data")
    x = jax.device_put(np.ones((400, 400), np.float32), source)
    route = ArrayTransfer([target])
    for _ in range(2):
        route([jax.block_until_ready(work(x))])
    slow = work(x)
    [moved] = route([slow])
    assert not moved.is_ready()  # type: ignore[attr-defined]
    slow.delete()
    np.testing.assert_allclose(moved, work(x), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "float8_e4m3fn", "float32", "complex64"])
def test_small_results_of_programs_arrive_whatever_their_type(dtype):
    route = ArrayTransfer([alone(1)] * 2, from_programs=True)
    values = (np.arange(15).reshape(3, 5) % 4).astype(jnp.dtype(dtype))
    same = jax.jit(lambda x: [x, x[0, 0]])
    for k in range(3):
        matrix, number = route(jax.block_until_ready(same(jax.device_put(np.roll(values, k), alone(0)))))
        np.testing.assert_array_equal(np.asarray(matrix), np.roll(values, k))
        assert np.asarray(number) == np.roll(values, k)[0, 0]


def test_what_a_program_failed_to_make_is_no_array_of_numbers():
    def fail(x):
        if failing:
            raise ValueError("the disk is full")
        return np.asarray(x)

    failing = False
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, a: jnp.tanh(a @ a.T) * 0.5, x)[0, :2])
    read = jax.jit(lambda x: jax.pure_callback(fail, shape, x))
    x, route = (
        jax.device_put(np.ones((400, 400), np.float32), alone(0)),
        ArrayTransfer([alone(1)], from_programs=True),
    )
    for _ in range(2):
        route([jax.block_until_ready(read(work(x)))])
    failing = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is full"):
        failed = read(work(x))  # raises at once where the callback is reached at once
        while not failed.is_ready():
            pass
        jax.block_until_ready(route([failed]))


def test_later_calls_do_without_device_put(monkeypatch):
    targets = [on([2, 3], "data"), on([2, 3], None, "data"), on([0, 1], "data"), alone(2)]
    sources = [on([0, 1], "data")] * 3 + [on([0, 1])]
    double = jax.jit(lambda xs: [x * 2 for x in xs], out_shardings=sources)
    route = ArrayTransfer(targets)
    route(double([VALUES] * 4))
    monkeypatch.setattr(jax, "device_put", None)
    for y in route(double([VALUES] * 4)):
        np.testing.assert_array_equal(y, VALUES * 2)


def test_several_threads_share_a_route():
    route, wrong = ArrayTransfer([on([2, 3], "data"), alone(4)]), []
    double = jax.jit(lambda x: x * 2)

    def many(k):
        for j in range(50):
            xs = [double(jax.device_put(VALUES + k + j, s)) for s in (on([0, 1], "data"), alone(0))]
            moved = route(xs)
            wrong.extend(y for y in moved if not np.array_equal(y, (VALUES + k + j) * 2))

    threads = [threading.Thread(target=many, args=(100 * k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
