"""More CPU devices in a live kernel. A test that restarts the backend runs alone, in a process of its own."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.simulated import alone, on_new_devices, spread, use

from jaxshard_magic import simulate
from jaxshard_magic.errors import ShardError
from jaxshard_magic.simulate import Machine

# Starting


@alone
def test_a_first_mesh_simulates_its_devices_without_a_restart():
    assert simulate.machine() == Machine(None, 0, None)
    built = use("data=4 model=2")
    assert built.mesh.devices.size == jax.device_count() == 8
    assert built.source == "simulated"
    assert built.notes == ("simulating 8 CPU devices",)
    assert int(os.environ["NPROC"]) >= 32


@pytest.mark.ci
@alone
def test_simulated_devices_start_before_anything_else_has_run():
    built = use("cpu:4 data=4")
    assert built.notes == ("simulating 4 CPU devices",)
    assert simulate.machine() == Machine("cpu", 4, 4)


@pytest.mark.ci
@alone
def test_enough_devices_are_used_as_they_are():
    before = use("data=8").mesh
    x = spread(np.arange(8.0), before, "data")
    after = use("data=2 model=2", {"x": x})
    assert list(after.mesh.devices.flat) == list(before.devices.flat)[:4]
    assert after.notes == ("simulating 4 CPU devices",)
    np.testing.assert_array_equal(x + x, 2 * np.arange(8.0))


@pytest.mark.ci
@alone
def test_a_lone_cpu_becomes_eight_devices_where_the_mesh_takes_the_rest():
    jnp.zeros(())
    assert use("data=-1 model=2").mesh.shape == {"data": 4, "model": 2}


@pytest.mark.ci
@alone
def test_devices_asked_for_by_the_user_are_kept_when_jax_starts():
    jax.config.update("jax_num_cpu_devices", 16)
    use("cpu:4 data=4")
    assert jax.device_count() == 16


@pytest.mark.ci
@alone
def test_as_many_devices_as_are_allowed_run_a_program():
    mesh = use("data=512").mesh
    assert int(spread(np.arange(512), mesh, "data").sum()) == 512 * 511 // 2


def test_jax_without_a_cpu_backend_says_what_to_set(monkeypatch):
    def no_cpu(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", no_cpu)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ShardError, match=r"limited to the platforms 'cuda'.*JAX_PLATFORMS=cuda,cpu"):
        simulate.cpu_devices()


# What happens to the arrays


@pytest.mark.ci
@alone
def test_sharded_committed_and_plain_arrays_all_work_on_the_new_devices():
    mesh = use("data=4").mesh
    host = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    (deleted := jnp.ones(3)).delete()
    user = {
        "sharded": spread(host, mesh, "data"),
        "replicated": spread(host, mesh),
        "committed": jax.device_put(host, jax.devices()[2]),
        "plain": jnp.asarray(host),
        "half": spread(host.astype(jnp.bfloat16), mesh, "data"),
        "deleted": deleted,
    }
    built = use("data=8", user)
    assert built.notes == ("simulating 8 CPU devices", "moved 5 arrays to the new devices")
    assert user.pop("deleted") is deleted
    assert on_new_devices(*user.values())
    assert all(x.dtype == (jnp.bfloat16 if k == "half" else jnp.float32) for k, x in user.items())
    for x in user.values():
        np.testing.assert_array_equal(np.asarray(x, np.float32), host)
    assert user["sharded"].sharding == NamedSharding(built.mesh, P("data"))
    assert user["replicated"].sharding == NamedSharding(built.mesh, P())
    assert user["committed"].devices() == {jax.devices()[2]}
    assert user["committed"].committed
    assert not user["plain"].committed
    for name in ("sharded", "replicated", "half", "plain"):
        np.testing.assert_array_equal(user[name] + spread(host, built.mesh, "data"), 2 * host)


@pytest.mark.ci
@alone
def test_keys_old_and_new_draw_the_same_numbers_after_the_move():
    mesh = use("data=4").mesh
    user = {
        "key": jax.random.key(0),
        "old": jax.random.PRNGKey(1),
        "keys": spread(jax.random.split(jax.random.key(2, impl="rbg"), 8), mesh, "data"),
        "replicated": spread(jax.random.key(3), mesh),
    }

    def drawn() -> list[np.ndarray]:
        single = [jax.random.normal(user[k], (3,)) for k in ("key", "old", "replicated")]
        return [np.asarray(x) for x in (*single, jax.vmap(jax.random.normal)(user["keys"]))]

    before = drawn()
    kinds = {k: x.dtype for k, x in user.items()}
    built = use("data=8", user)
    assert on_new_devices(*user.values())
    assert {k: x.dtype for k, x in user.items()} == kinds
    assert user["keys"].sharding.mesh == user["replicated"].sharding.mesh == built.mesh
    for a, b in zip(before, drawn(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.ci
@alone
def test_types_survive_weak_ones_and_64_bit_ones():
    mesh = use("data=4").mesh
    user = {
        "step": jnp.add(1, 1),
        "rate": spread(jnp.full((4,), 0.5), mesh, "data"),
        "count": spread(jnp.add(2, 2), mesh),
        "lost": spread(jnp.full((4,), 0.5), jax.make_mesh((4,), ("x",)), "x"),
    }
    with jax.enable_x64(True):
        user["wide"] = spread(np.array([2.0**-1060, 1.0, 2.0, 3.0]), mesh, "data")
        user["big"] = jnp.asarray(2**40)
    was = {k: (x.dtype, x.weak_type) for k, x in user.items()}
    assert was["step"][1] and was["rate"][1] and was["count"][1]
    use("data=8", user)
    assert on_new_devices(*user.values())
    assert {k: (x.dtype, x.weak_type) for k, x in user.items()} == was
    assert int(user["big"]) == 2**40
    assert np.asarray(user["wide"])[0] == 2.0**-1060


@pytest.mark.ci
@alone
def test_what_cannot_keep_its_spec_is_unsharded_and_said():
    mesh = use("fsdp=4").mesh
    user = {"lost": spread(np.arange(8.0), mesh, "fsdp"), "kept": spread(np.arange(8.0), mesh)}
    built = use("data=8", user)
    assert built.notes[1] == (
        "moved 2 arrays to the new devices, 1 of them unsharded: this mesh lacks their axes, "
        "or its sizes don't divide them"
    )
    assert not user["lost"].committed
    np.testing.assert_array_equal(user["lost"] + user["kept"], 2 * np.arange(8.0))


@pytest.mark.ci
@alone
def test_meshes_and_arrays_that_stay_behind_are_noted():
    mesh = use("data=4").mesh
    x = spread(np.arange(8.0), mesh, "data")
    hidden = iter([spread(np.arange(4.0), mesh, "data")])
    jax.set_mesh(mesh)
    user = {"x": x, "mesh": mesh, "sharding": x.sharding, "_": mesh, "hidden": hidden}
    del x
    built = use("data=8", user)
    assert built.notes == (
        "simulating 8 CPU devices",
        "moved 1 array to the new devices",
        "mesh: still on the old devices; make it again",
        "sharding: still on the old devices; make it again",
        "jax.set_mesh: now this mesh",
        "1 sharded array outside the namespace stayed on the old devices, readable; "
        "move one with jax.device_put(x, sharding)",
    )
    assert jax.sharding.get_mesh() == built.mesh
    left = next(hidden)
    np.testing.assert_array_equal(left, np.arange(4.0))
    assert on_new_devices(jax.device_put(left, NamedSharding(built.mesh, P())))


@pytest.mark.ci
@alone
def test_the_default_device_is_the_same_one_of_the_new_devices():
    use("data=4")
    jax.config.update("jax_default_device", jax.devices()[1])
    user = {"x": jnp.ones(3)}
    use("data=8", user)
    assert jnp.ones(3).devices() == user["x"].devices() == {jax.devices()[1]}


@alone
def test_when_an_array_cannot_be_read_nothing_changes():
    mesh = use("data=4").mesh
    user = {"good": spread(np.arange(8.0), mesh, "data"), "bad": spread(np.arange(4), mesh, "data")}
    before, devices, read = dict(user), jax.devices(), np.asarray

    def fails(x, *args, **kwargs):
        if x is user["bad"]:
            raise jax.errors.JaxRuntimeError("INTERNAL: it went wrong\nin many lines")
        return read(x, *args, **kwargs)

    np.asarray = fails
    with pytest.raises(ShardError) as caught:
        use("data=8", user)
    np.asarray = read
    assert str(caught.value) == (
        "an array, int32[4], cannot be read, so nothing was moved (INTERNAL: it went wrong). Delete it or make it again"
    )
    assert jax.devices() == devices
    assert all(user[k] is before[k] for k in before)
