"""The predicted step against figures worked out by hand from a chip's published rates.

Large products reach 0.95 of a TPU's peak, at worst 0.85, collectives 0.9 of a link, each hop of an ICI takes 8/3 us.
What lies between products reads and writes their activations once more.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from support.sample_reports import overlapped

import jaxshard_magic
from jaxshard_magic.analysis.roofline import bandwidth_seconds, efficiency, matmul_seconds, roofline
from jaxshard_magic.errors import ShardError
from jaxshard_magic.hardware import chip
from jaxshard_magic.links import axis_links
from jaxshard_magic.plan import DeviceWork
from jaxshard_magic.report import Collective, Leaf
from jaxshard_magic.views import words
from jaxshard_magic.views.format import seconds_text, share_text

V5E, H100 = chip("v5e"), chip("h100")
D, N = 512, 64


def params(n: int, role: str = "params") -> Leaf:
    return Leaf(f"{role}.w", role, (n // 4,), "float32", (None,), n, n, "")


def gather(count: int, nbytes: int, axes=("data",), **more) -> Collective:
    return Collective("all-gather", axes, 8, count, nbytes, count * nbytes * 7 // 8, **more)


def test_a_product_takes_the_longer_of_its_flops_and_its_bytes():
    # v5e: 197 TFLOP/s in bfloat16, 0.82 TB/s: 1 TFLOP takes 5.08 ms, 1 GB 1.22 ms.
    busy, waits = DeviceWork(10**12, 10**9, "bfloat16"), DeviceWork(10**9, 10**10, "bfloat16")
    found = roofline(V5E, {"data": 8}, [busy, waits], [], [])
    compute, memory = 1e12 / 197e12, 1e10 / V5E.hbm_bandwidth
    assert found.compute == pytest.approx(compute + 1e9 / 197e12)
    assert found.memory == pytest.approx(memory + 1e9 / V5E.hbm_bandwidth)
    assert found.ideal == pytest.approx(compute + memory)
    between = 1.1e10 / V5E.hbm_bandwidth
    assert found.own == pytest.approx(compute / 0.95 + memory + between)
    assert found.step == found.own
    assert found.bound_by_memory == pytest.approx((memory + between) / found.own)
    assert found.bound == "memory"
    assert found.waiting == pytest.approx(memory + between)


def test_the_update_reads_and_writes_state_once():
    leaves = [params(4 * 10**9), params(8 * 10**9, "optimizer"), params(10**6, "batch")]
    found = roofline(V5E, {"data": 8}, [], leaves, [])
    assert found.own == pytest.approx((3 * 4e9 + 2 * 8e9) / V5E.hbm_bandwidth)


def test_what_is_sent_takes_its_bytes_over_the_axis_bandwidth():
    wires = axis_links(H100, {"data": 2, "model": 8})
    inside = replace(gather(3, 8 * 10**9, ("model",)))
    assert bandwidth_seconds(inside, wires) == pytest.approx(3 * 7e9 / 450e9)
    across = gather(1, 8 * 10**9, ("data", "model"))  # as slow as the slower of the two
    assert bandwidth_seconds(across, wires) == pytest.approx(7e9 / 50e9)
    assert bandwidth_seconds(gather(1, 8, None), wires) is None
    assert bandwidth_seconds(gather(1, 8, exact=False), axis_links(H100, {"data": 8})) is None


def test_communication_bounds_a_step_where_it_takes_longer_than_all_else():
    share = DeviceWork(197 * 10**9, 10**6, "bfloat16", weights=10**6)  # 1 ms
    found = roofline(V5E, {"data": 8}, [share], [], [replace(gather(1, 8 * 10**8), kind="all-to-all")])
    assert found.communication == pytest.approx(7e8 / axis_links(V5E, {"data": 8})["data"].bandwidth)
    assert (found.bound, found.exposed) == ("communication", pytest.approx(found.communication / 0.9))
    assert found.step == pytest.approx(found.communication / 0.9 + 1e-3 / 0.95)


def test_a_range_is_from_all_overlapped_at_the_peak_to_nothing_overlapped():
    share, nbytes = (
        DeviceWork(197 * 10**9, 10**6, "bfloat16", weights=10**6),
        8 * 10**7,
    )  # 1 ms, and 0.78 ms on the links
    found = roofline(V5E, {"data": 8}, [share], [], [gather(1, nbytes)])
    sent = 7e7 / axis_links(V5E, {"data": 8})["data"].bandwidth
    assert found.low == pytest.approx(1e-3)
    own = 1e-3 / 0.95
    assert found.step == pytest.approx(own + sent / 0.9 - own / 3)  # a third of the compute hides, less than 0.8 of it
    assert found.least == pytest.approx(1e-3 / 0.95)
    assert found.high == pytest.approx(1e-3 / 0.85 + sent / 0.9)
    more = roofline(V5E, {"data": 8}, [share], [], [gather(4, nbytes)])
    assert more.low == pytest.approx(4 * sent)
    assert more.least == pytest.approx(4 * sent / 0.9)  # no more than compute hides
    assert more.step == pytest.approx(own + 4 * sent / 0.9 - own / 3)


def test_what_a_plan_takes_to_be_hidden_is_what_programs_for_the_chip_hide(monkeypatch):
    def waited(name: str) -> float:
        share = DeviceWork(10**15, 10**6, "bfloat16", weights=10**6)  # room enough
        found = roofline(chip(name), {"data": 8}, [share], [], [gather(1, 10**8)])
        return (found.exposed or 0.0) / (found.total_link_seconds or 1.0)

    assert waited("v5e") == pytest.approx(0.2) and waited("v6e") == pytest.approx(0.75)
    assert waited("v5p") == waited("v4") == waited("h100") == 1
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true")
    assert waited("v5e") == waited("v5p") == pytest.approx(0.5) and waited("h100") == 1


def test_small_collectives_take_their_hops_and_sums_of_gradients_are_sent_as_one():
    """2x4 of v5e are lines, no rings: 1 + 3 hops of 8/3 us from corner to corner, which an all-reduce goes twice."""
    share = DeviceWork(10**6, 0, "bfloat16")
    hops = 4 * 8e-6 / 3

    def sent(*rows, batch=("data",)) -> float:
        return roofline(V5E, {"data": 8}, [share], [], rows, None, batch).total_link_seconds

    sums = [replace(gather(1, 64), kind="all-reduce") for _ in range(3)]
    assert sent(gather(10, 64)) == pytest.approx(10 * hops)
    assert sent(*sums) == pytest.approx(2 * hops)
    assert sent(*sums, batch=()) == pytest.approx(3 * 2 * hops)  # of activations, which the next product waits for
    assert sent(replace(sums[0], count=5)) == pytest.approx(2 * hops)  # a row may be of several that are alike


def test_a_product_that_fills_its_tiles_badly_takes_longer():
    """The unit of v5e is 128 wide, that of v6e 256; rows go in by eights, on whichever side that is better."""

    def reached(name: str, *dims: int) -> float:
        share = DeviceWork(10**12, 0, "bfloat16", matrix_dims=dims)
        return efficiency(chip(name), share) / 0.95

    assert reached("v5e", 4096, 4096, 4096) == pytest.approx(1)
    assert reached("v5e", 4096, 4096, 64) == pytest.approx(1 / 2)
    assert reached("v6e", 4096, 4096, 128) == pytest.approx(1 / 2)
    assert reached("v5e", 4096, 4096, 192) == pytest.approx(192 / 256)
    assert reached("v5e", 4, 4096, 4096) == pytest.approx(4 / 8)
    assert reached("v5e", 4096, 4, 4096) == pytest.approx(4 / 8)
    assert reached("h100", 4, 4, 4) * 0.95 == pytest.approx(0.8)  # no tiles of a GPU are known


def test_float32_at_the_highest_precision_takes_six_passes_of_a_tpu():
    def exact(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.dot(x, w, precision="highest") ** 2))(w)

    step = jaxshard_magic.shard(exact, "dp", mesh="data=8", on="v5e")
    shares = step.planned(jnp.ones((D, D)), jnp.ones((N, D))).plan.shares
    assert {share.passes for share in shares} == {6}
    assert [share.matrix_dims for share in shares] == [(N // 8, D, D), (D, D, N // 8)]
    assert matmul_seconds(V5E, shares[0]) == pytest.approx(6 * 2 * N // 8 * D * D / 197e12)
    assert matmul_seconds(H100, shares[0]) == pytest.approx(2 * N // 8 * D * D / H100.peak("float32"))


def test_a_step_is_bound_by_the_longest_of_the_three_parts_that_its_bar_shows():
    busy, waits = (
        DeviceWork(197 * 10**9, 10**6, "bfloat16", weights=10**6),
        DeviceWork(1, (moved := int(1e-3 * V5E.hbm_bandwidth)), "bfloat16", weights=moved),
    )
    rate = axis_links(V5E, {"data": 8})["data"].bandwidth
    row = replace(gather(1, int(1.5e-3 * rate * 8 / 7)), kind="all-to-all")
    found = roofline(V5E, {"data": 8}, [busy, waits], [], [row])
    assert found.own > found.exposed > found.waiting
    assert found.bound == "communication"


def test_what_is_not_known_is_not_predicted():
    assert roofline(V5E, {"data": 8}, None, [], []).step is None
    assert roofline(V5E, {"data": 8}, [DeviceWork(1, 1, "float64")], [], []).own is None
    assert roofline(V5E, {"data": 8}, [DeviceWork(1, 1, "bfloat16", exact=False)], [], []).own is None
    odd = roofline(V5E, {"data": 8}, [DeviceWork(1, 1, "bfloat16")], [], [gather(1, 8, None)])
    assert (odd.step, odd.bound) == (None, None)
    assert roofline(V5E, {"data": 8}, [DeviceWork(1, 1, "bfloat16")], [], None).communication is None


def linear(w, x):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad


def timed(strategy: str, mesh: str, on: str | None = "v5e"):
    step = jaxshard_magic.shard(linear, strategy, mesh=mesh, on=on)
    step.prepare(jnp.ones((D, D)), jnp.ones((N, D)))
    return step.report().timing


def test_a_step_is_predicted_from_what_one_device_does():
    # Forward x @ w and backward x.T @ g: 2 N D D each; the gradient of x is not needed.
    got = timed("dp", "data=8")
    assert got.flops == 2 * 2 * N * D * D
    assert got.device_flops == got.flops / 8
    assert (got.on, got.recomputed, got.mfu) == ("TPU v5e", 0, None)
    assert got.compute_s == pytest.approx(got.device_flops / 197e12)
    # Products: x (N/8, D), w and the result forward; x, g and the result backward; then the update of w.
    x, w = 4 * N // 8 * D, 4 * D * D
    assert got.memory_s == pytest.approx((2 * (2 * x + w) + 3 * w) / V5E.hbm_bandwidth)
    sent = 2 * 7 / 8 * w + 2 * 7 / 8 * 4
    assert got.communication_s == pytest.approx(sent / (0.9 * got.links["data"]), rel=1e-3)
    assert got.exposed_s == pytest.approx(got.communication_s)
    between = 2 * 2 * x / V5E.hbm_bandwidth  # all but w, of both
    assert got.predicted_step_s == pytest.approx(got.memory_s + between + got.exposed_s)


def test_tensor_parallel_devices_share_the_products_too():
    assert timed("tp", "data=4 model=2").device_flops == 2 * 2 * N * D * D / 8
    assert timed("fsdp", "data=8").device_flops == 2 * 2 * N * D * D / 8


def test_an_axis_that_nothing_uses_divides_no_work():
    got = timed("dp", "data=4 model=2")
    assert got.device_flops == got.flops / 4


def test_no_speed_is_predicted_on_simulated_devices_unless_a_chip_is_named():
    got = timed("dp", "data=8", on=None)
    assert (got.flops, got.predicted_step_s, got.on, got.communication_s) == (
        2 * 2 * N * D * D,
        None,
        None,
        None,
    )


def test_an_unknown_chip_is_refused_with_the_nearest_name():
    with pytest.raises(ShardError, match=r"'v5f' names no known chip.*Did you mean 'v5.'") as error:
        timed("dp", "data=8", on="v5f")
    assert "\n" not in str(error.value)


def test_the_share_of_the_peak_is_of_the_useful_flops_alone():
    from jaxshard_magic.analysis.roofline import timing
    from jaxshard_magic.report import TimeSpread, Timing

    def train_step(w, x):
        loss, grad = jax.value_and_grad(jax.checkpoint(lambda w: jnp.sum(jnp.tanh(x @ w) @ w)))(w)
        return w - 0.1 * grad, loss

    step = jaxshard_magic.shard(train_step, "dp", mesh="data=8")
    entry = step.prepare(jnp.ones((D, D)), jnp.ones((N, D)))
    one = 2 * N * D * D
    measured = Timing(1.0, 3, 2, TimeSpread(1e-3, 2e-3, 3e-3))
    found = roofline(V5E, {"data": 8}, entry.plan.shares, [], [])
    got = timing(measured, entry.plan, found, (), attached=True)
    assert (got.flops, got.recomputed) == (6 * one, one)  # two forward, three backward, the first one again
    assert got.mfu == pytest.approx(5 * one / 8 / 197e12 / 2e-3)


def test_a_pipeline_is_predicted_with_the_sums_of_its_gradients():
    """Two stages of two alike layers, each on two devices that halve the examples: beside the stages' own time and the
    update each device adds up the gradients of its two weights, 2 (n - 1) / n of their bytes."""
    width = 128

    def step(weights, batch):
        def loss(weights):
            x = batch
            for w in weights:
                x = x @ w
            return jnp.square(x).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    args = [jnp.ones((width, width))] * 4, jnp.ones((16, width))
    sharded = jaxshard_magic.shard(step, "pp+dp", mesh=jaxshard_magic.mesh("cpu:4 pipe=2 data=2"), on="v5e")
    sharded.prepare(*args)
    report = sharded.report()
    weights = 2 * width * width * 4  # bytes of a stage
    links = axis_links(V5E, {"pipe": 2, "data": 2})["data"].bandwidth
    assert report.pipeline is not None and report.timing is not None and links is not None
    stages = max(event.end for event in report.pipeline.events)
    update = 3 * weights / V5E.hbm_bandwidth
    sums = 2 * (2 - 1) / 2 * weights / links
    timing = report.timing
    assert timing.predicted_step_s == pytest.approx(stages + update + sums, rel=1e-3)
    # at least: no action waits for its start by the host, 36 us; at most: sums at 0.9 of the links, products slower
    assert timing.predicted_low_s is not None and timing.predicted_high_s is not None
    assert update < timing.predicted_low_s < 36e-6
    assert timing.predicted_high_s > timing.predicted_step_s + (1 / 0.9 - 1) * sums


def test_a_report_tells_what_is_hidden_and_the_range_around_the_guess():
    """Sample: 17.6 ms of products; gathers wait a tenth of their time on the links, sums all of it."""
    report = overlapped()
    assert report.timing is not None and report.collectives
    gathers = sum(c.seconds for c in report.collectives if c.kind == "all-gather")
    rest = sum(c.seconds for c in report.collectives) - gathers
    waited = rest + gathers / 10
    parts = words.time_parts(report)
    assert sum(s for _, _, s in parts) == pytest.approx(0.0176 + waited) == report.timing.predicted_step_s
    assert sum(s for kind, _, s in parts if kind == "all-gather") == pytest.approx(gathers / 10)
    assert words.communication_share(report) == share_text(waited / (0.0176 + waited))
    text = " ".join(report.to_text(100).split()).replace("\u202f", " ")
    assert "16.4 to 51.2 ms" in text
    lead = "".join(span.text for span in words.communication_lead(report))
    links = seconds_text(report.timing.communication_s)
    assert f", what nothing hides of {links} on the links, in the order of the compiled program. " in lead
    assert "16.4 to 51.2" in report.to_html().replace("\u202f", " ").replace("&#8239;", " ")
