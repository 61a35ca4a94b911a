"""What of a program's communication is hidden: small scheduled programs, their exposed seconds worked out by hand.

On a v5e ring of 16 devices links carry 90 GB/s, one direction of a line of 8 45 GB/s.
"""

from importlib.util import find_spec

import jax.numpy as jnp
import pytest
from support.apart import Shape, folder, sharded

import jaxshard_magic
from jaxshard_magic.analysis.collectives import module_collectives
from jaxshard_magic.analysis.hlo import parse_module
from jaxshard_magic.analysis.overlap import exposed_times, read_schedule
from jaxshard_magic.hardware import chip
from jaxshard_magic.links import axis_links, collective_latency

__all__ = ["folder"]

V5E, H100 = chip("v5e"), chip("h100")
RING = axis_links(V5E, {"data": 16}, (1, 16))
SENT = 90_000_000 * 16 // 15  # bytes gathered: one device sends 90 MB of it, in 1 ms
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, use_global_device_ids=true, channel_id=1"
HEADER = "HloModule m, is_scheduled=true, num_partitions=16\n\n"


def cycles(ms: float) -> str:
    return f', backend_config={{"estimated_cycles":"{round(1000 * ms)}"}}' if ms else ""


def work(name: str, ms: float) -> str:
    return f"  %{name} = f32[8] fusion(%p), kind=kLoop, calls=%f{cycles(ms)}\n"


def start(name: str, of: str = "%p") -> str:
    size = SENT // 16 // 4
    return f"  %{name} = (f32[{size}], f32[{16 * size}]) all-gather-start({of}), {GROUPS}, dimensions={{0}}\n"


def done(name: str) -> str:
    return f"  %{name}.done = f32[{SENT // 4}] all-gather-done(%{name})\n"


def program(body: str, before: str = "", root: str = "f32[8] copy(%p)") -> str:
    fused = "%f (q: f32[8]) -> f32[8] {\n  ROOT %q = f32[8] parameter(0)\n}\n\n"
    p = f"  %p = f32[{SENT // 64}] parameter(0)\n"
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{p}{body}  ROOT %r = {root}\n}}\n"
    return HEADER + fused + before + entry


def waits(text: str, own_ms: float, wires=RING, axes=None, of=V5E) -> list[float]:
    """Milliseconds, of each collective."""
    module = parse_module(text)
    found = module_collectives(module, axes or {"data": 16})
    order = read_schedule(module, found)
    assert order is not None
    ran = exposed_times(order, found, of, wires, own_ms / 1e3)
    assert ran is not None
    return [1e3 * seconds for seconds in ran.wait_seconds]


def test_what_lies_between_start_and_end_hides_a_collective():
    text = program(start("ag") + work("a", 0.4) + done("ag") + work("b", 2))
    assert waits(text, 2.4) == pytest.approx([0.6], rel=1e-4)
    assert waits(program(start("ag") + work("a", 1.5) + done("ag")), 1.5) == [0]
    assert waits(program(work("a", 1.5) + start("ag") + done("ag")), 1.5) == pytest.approx([1], rel=1e-4)


def test_a_collective_without_a_start_is_waited_for():
    alone = (
        start("ag").replace("all-gather-start", "all-gather").replace(f"(f32[{SENT // 64}], ", "").replace("])", "]", 1)
    )
    assert waits(program(work("a", 1) + alone + work("b", 1)), 2) == pytest.approx([1], rel=1e-4)


def test_estimates_of_cycles_are_ratios_inside_the_program():
    text = program(start("ag") + work("a", 0.4) + done("ag") + work("b", 2))
    assert waits(text, 1.2) == pytest.approx([0.8], rel=1e-4)  # all takes half as long as estimated


def test_collectives_on_the_same_links_go_one_after_the_other():
    text = program(start("x") + start("y") + work("a", 1.2) + done("x") + done("y"))
    assert waits(text, 1.2) == pytest.approx([0, 0.8], rel=1e-4)


def test_axes_with_links_of_their_own_carry_at_the_same_time():
    """28 MB over data and 16 MB over model at 45 GB/s, 0.622 and 0.356 ms: the second is over before the first."""
    axes = {"data": 8, "model": 2}
    wires = axis_links(V5E, axes, (8, 2))
    groups = {"x": "[2,8]<=[8,2]T(1,0)", "y": "[8,2]<=[16]"}
    given, starts, ends = "", "", ""
    for k, (name, size) in enumerate({"x": 1_000_000, "y": 4_000_000}.items(), 1):
        told = f"replica_groups={groups[name]}, use_global_device_ids=true, channel_id={k}"
        given += f"  %{name}.in = f32[{size}] parameter({k})\n"
        starts += f"  %{name} = (f32[{size}], f32[8000000]) all-gather-start(%{name}.in), {told}\n"
        ends += f"  %{name}.done = f32[8000000] all-gather-done(%{name})\n"
    got = waits(program(given + starts + work("a", 0.1) + ends), 0.1, wires, axes)
    assert got == pytest.approx([28 / 45 - 0.1, 0], rel=1e-4)


LOOP = """%cond (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

"""
WHILE = '  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}\n'


def loop(inside: str) -> str:
    given = f"  %p = f32[{SENT // 64}] parameter(0)\n"
    return LOOP + f"%body (p: f32[8]) -> f32[8] {{\n{given}{inside}  ROOT %t = f32[8] copy(%p)\n}}\n\n"


def test_a_loop_waits_in_every_trip():
    inside = start("ag") + work("a", 0.4) + done("ag")
    assert waits(program(WHILE, loop(inside)), 5 * 0.4) == pytest.approx([5 * 0.6], rel=1e-4)


def test_what_ends_in_the_next_trip_is_hidden_as_far_as_links_keep_up():
    assert waits(program(WHILE, loop(work("a", 1.5) + start("ag"))), 5 * 1.5) == [0]
    assert waits(program(WHILE, loop(work("a", 0.4) + start("ag"))), 5 * 0.4) == pytest.approx([5 * 0.6], rel=1e-4)


def test_a_loop_that_uses_no_links_hides_what_began_before_it():
    text = program(start("ag") + WHILE + done("ag"), loop(work("a", 0.1)))
    assert waits(text, 0.5) == pytest.approx([0.5], rel=1e-4)


def fusion(name: str, *marks: str) -> str:
    """A piece of a gather, as TPU has it."""
    size = SENT // 64
    lines = [
        f"%{name} ({name}.q: f32[{size}]) -> f32[8] {{",
        f"  %{name}.q = f32[{size}] parameter(0)",
        f"  %{name}.g = f32[{16 * size}] all-gather(%{name}.q), {GROUPS}, dimensions={{0}}, "
        'frontend_attributes={chain_id="7"}',
        *(f'  %{name}.{m} = f32[8] custom-call(%{name}.g), custom_call_target="{m}"' for m in marks),
        f"  ROOT %{name}.r = f32[8] copy(%{name}.g)",
    ]
    return "\n".join(lines) + "\n}\n\n"


def calls(name: str, of: str, ms: float = 0) -> str:
    return f"  %{name} = f32[8] fusion(%p), kind=kCustom, calls=%{of}{cycles(ms)}\n"


def test_a_tpu_starts_steps_and_ends_a_gather_in_fusions():
    """The gather stands in each of the three, and is sent once; the fusion between computes beside it."""
    pieces = fusion("f1", "AsyncCollectiveStart") + fusion("f2") + fusion("f3", "AsyncCollectiveDone")
    text = program(calls("s", "f1") + calls("step", "f2", 0.3) + work("a", 0.1) + calls("d", "f3"), pieces)
    assert waits(text, 0.4) == pytest.approx([0.6], rel=1e-4)


def test_a_fusion_that_starts_and_ends_a_gather_hides_it_by_its_own_work():
    pieces = fusion("f1", "AsyncCollectiveStart", "AsyncCollectiveDone")
    assert waits(program(calls("s", "f1", 0.3) + work("a", 2), pieces), 2.3) == pytest.approx([0.7], rel=1e-4)


def test_what_sends_little_takes_as_long_as_its_hops():
    small = (
        program(start("ag") + done("ag") + work("a", 1))
        .replace(str(SENT // 64), "4")
        .replace(str(16 * (SENT // 64)), "64")
    )
    assert waits(small, 1) == pytest.approx([8 * 8e-3 / 3], rel=1e-4)  # half of a ring of 16, 8/3 us a hop
    line = axis_links(V5E, {"data": 4, "model": 4}, (4, 4))["data"]
    assert collective_latency("all-gather", [line]) == pytest.approx(8e-6)  # 3 hops, as measured
    assert collective_latency("all-reduce", [line]) == pytest.approx(16e-6)
    assert collective_latency("collective-permute", [line]) == pytest.approx(8e-6 / 3)


def test_gpu_programs_hide_by_their_products():
    """On 8 H100 links carry 450 GB/s. A product of 4096 x 4096 x 4096 takes 0.139 ms at the peak, and is all that the
    program does: the work between start and end is half of it."""
    axes = {"data": 8}
    n = 4096
    gather = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, channel_id=1"
    product = (
        f'  %NAME = bf16[{n},{n}] custom-call(%x, %x), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}\n'
    )
    text = (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        f"ENTRY %main (x: bf16[{n},{n}], y: f32[5000000]) -> f32[8] {{\n"
        f"  %x = bf16[{n},{n}] parameter(0)\n  %y = f32[5000000] parameter(1)\n"
        f"  %ag = (f32[5000000], f32[40000000]) all-gather-start(%y), {gather}\n"
        + product.replace("NAME", "one")
        + "  %ag.done = f32[40000000] all-gather-done(%ag)\n"
        + product.replace("NAME", "two")
        + "  ROOT %r = f32[8] copy(%x)\n}\n"
    )
    wires = axis_links(H100, axes)
    flops, copied = 2 * n**3 / 989.5e12, (2 * n * n + 4 * 8) / H100.hbm_bandwidth
    share = flops / (2 * flops + copied)
    own = 0.2e-3
    assert waits(text, 1e3 * own, wires, axes, H100) == pytest.approx([1e3 * (140e6 / 450e9 - share * own)], rel=1e-2)


def test_a_program_in_no_order_tells_nothing():
    text = program(start("ag") + done("ag")).replace("is_scheduled=true, ", "")
    module = parse_module(text)
    assert read_schedule(module, module_collectives(module, {"data": 16})) is None


def test_a_loop_of_unknown_length_tells_nothing():
    text = program(WHILE.replace('"known_trip_count":{"n":"5"}', ""), loop(start("ag") + done("ag"))).replace(
        "constant(5)", "copy(%i)"
    )
    module = parse_module(text)
    assert read_schedule(module, module_collectives(module, {"data": 16})) is None


SHAPES = Shape((4096, 4096), jnp.float32), Shape((64, 4096), jnp.float32)


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_waits_for_the_sum_of_gradients_at_the_end_of_a_step():
    """The gradient, in whatever type the compiler sends it, is summed where nothing is left to compute."""
    step = sharded()
    step.prepare(*SHAPES)
    report = step.report()
    assert report.collectives and report.timing
    summed = max(report.collectives, key=lambda c: c.wire_bytes)
    assert (summed.kind, report.timing.overlap) == ("all-reduce", "scheduled")
    assert summed.exposed == pytest.approx(summed.wire_bytes / (0.9 * report.timing.links["data"]))
    assert report.timing.exposed_s == pytest.approx(sum(c.exposed for c in report.collectives))


def test_what_a_cpu_hides_is_not_known():
    step = jaxshard_magic.shard(lambda w, x: w - 0.1 * w * (x @ w).sum(), "dp", mesh="cpu:8 data=8", on="v5e")
    step.prepare(*SHAPES)
    report = step.report()
    assert report.collectives and report.timing and report.timing.overlap == "by rule"
    assert [c.exposed for c in report.collectives] == [c.seconds for c in report.collectives]  # it hides no sum
