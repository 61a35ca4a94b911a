"""Recordings read back: their sums against figures that were worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.recordings import CELL, Event, at, call, operation, program, recorded

from jaxshard_magic.analysis.collectives import module_collectives
from jaxshard_magic.analysis.hlo import parse_module as read_hlo
from jaxshard_magic.analysis.host_totals import HostTotals, host_totals, longest, run_durations
from jaxshard_magic.analysis.instructions import Instructions
from jaxshard_magic.analysis.intervals import divide_by_rank, innermost
from jaxshard_magic.analysis.lanes import MOST_PIECES, LanePiece, lanes_of
from jaxshard_magic.analysis.origin import HloOrigins, with_causes
from jaxshard_magic.analysis.origin import with_origins as with_origins
from jaxshard_magic.analysis.sources import SourceText
from jaxshard_magic.analysis.time_breakdown import StepPredictions, time_breakdown
from jaxshard_magic.analysis.xplane import read_trace
from jaxshard_magic.report import LineTime, Measured

US = 1e-6
NOTHING = StepPredictions({}, {}, {}, {})

GATHER = "channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true"
CALLBACK = 'custom_call_target="xla_ffi_python_cpu_callback"'

PROGRAM = program(
    f"""%body (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
  ROOT %add.4 = f32[8] add(%p, %p), {at(6, "transpose(jvp())/while/body/add")}
}}

%condition (q: f32[8]) -> pred[] {{
  %q = f32[8] parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (a: f32[4]) -> f32[8] {{
  %a = f32[4] parameter(0)
  %dot.1 = f32[4] multiply(%a, %a), {at(3, "jvp()/dot_general")}
  %all-gather.2 = f32[8] all-gather(%dot.1), {GATHER}, {at(4, "jvp()/gather")}
  %while.3 = f32[8] while(%all-gather.2), condition=%condition, body=%body, {at(5, "transpose(jvp())/while")}
  %copy.6 = f32[4] copy(%a), {at(8, "transpose(jvp(checkpoint))/rematted_computation/copy")}
  ROOT %callback.5 = f32[8] custom-call(%while.3), {CALLBACK}, {at(7, "shard.update/pure_callback")}
}}
"""
)


def one_run(base: float) -> tuple[dict[str, list[Event]], Event]:
    """One call of the step on two devices, 70 us from its first operation to its last."""

    def on(device: int, name: str, start: float, end: float) -> Event:
        return operation(name, base + start, base + end, device)

    loop = (("while.3", 30, 60), ("add.4", 30, 40), ("add.4", 42, 58))
    first = [on(0, "dot.1", 0, 10), on(0, "all-gather.2", 10, 30), *(on(0, *each) for each in loop)]
    other = [on(1, "dot.1", 0, 22), on(1, "all-gather.2", 22, 30), *(on(1, *each) for each in loop)]
    threads = {
        "tf_XLA/0": [
            *first,
            on(0, "callback.5", 60, 64),
            Event("Wait: pending_threads=1/2", base + 10, base + 22),
            Event("end: dot.1", base, base + 70),
            Event("ThreadpoolListener::Record", base, base + 70),
            operation("dot.1", base + 64, base + 70, 0, "jit_other"),
        ],
        "tf_XLA/1": [*other, on(1, "callback.5", 60, 70)],
        "tf_XLA/2": [on(0, "copy.6", 15, 25)],  # beside the gather
    }
    return threads, call(base - 5, base + 75)


def instructions(text: str) -> dict[str, Instructions]:
    module = read_hlo(text)
    origins = HloOrigins(module, [CELL])
    told = with_causes(module, with_origins(module, module_collectives(module, {"data": 2}), origins), [], SourceText())
    return {"jit_step": Instructions(module, origins, told)}


def measured(xspace: bytes, text: str, devices: Mapping[int, int], rates: StepPredictions = NOTHING) -> Measured:
    trace = read_trace(xspace, {"jit_step"})
    return time_breakdown([host_totals(trace, instructions(text), devices, run_durations(trace, devices))], rates)


def by_hand(starts: tuple[float, ...] = (100, 300, 500), later: float = 0) -> bytes:
    """Runs that begin at `starts`. `later`: device 1 copies for so long behind everything else."""
    lines: dict[str, list[Event]] = {"python": []}
    for base in starts:
        threads, mark = one_run(base)
        if later:
            threads["tf_XLA/3"] = [operation("copy.6", base + 70, base + 70 + later, 1)]
        lines["python"].append(mark)
        for name, events in threads.items():
            lines.setdefault(name, []).extend(events)
    return recorded({"/host:CPU": lines})


def row(
    line: int,
    phase: str,
    compute: float = 0,
    moving: float = 0,
    waiting: float | None = 0,
    host: float = 0,
) -> LineTime:
    waits = None if waiting is None else pytest.approx(waiting * US, abs=1e-9)
    compute_s, moving_s, host_s = (pytest.approx(each * US, abs=1e-9) for each in (compute, moving, host))
    return LineTime(CELL, line, phase, compute_s, moving_s, waits, None, host_s)  # pyright: ignore


def test_a_recording_adds_up_to_the_figures_worked_out_by_hand():
    found = measured(by_hand(), PROGRAM, {0: 0, 1: 1})
    assert {row.line: row for row in found.lines} == {
        3: row(3, "forward", compute=(10 + 22) / 2),
        4: row(4, "forward", moving=(5 + 8) / 2, waiting=5 / 2),
        5: row(5, "backward", compute=4),  # the loop's own: what none of its body takes
        6: row(6, "backward", compute=10 + 16),
        7: row(7, "update", waiting=(4 + 10) / 2, host=(4 + 10) / 2),
        8: row(8, "recomputed", compute=10 / 2),
    }
    assert (found.unknown, found.others, found.host) == (
        None,
        None,
        pytest.approx(10 * US),
    )  # of the second device
    (gather,) = found.collectives  # whole, with what compute hides of it
    assert (gather.kind, gather.axes) == ("all-gather", ("data",))
    assert (gather.seconds, gather.waiting) == (pytest.approx(8 * US), pytest.approx(6 * US))
    first, second = found.devices
    assert [first.compute, first.moving, first.waiting, first.overlap, first.idle] == pytest.approx(
        [50 * US, 5 * US, 9 * US, 3 * US, 6 * US]
    )
    assert [second.compute, second.moving, second.waiting, second.overlap, second.idle] == pytest.approx(
        [52 * US, 8 * US, 10 * US, 0, 0], abs=1e-9
    )
    assert (found.slowest, found.behind) == (1, pytest.approx(1 * US))
    assert (found.recorded, found.read, found.step_s.median) == (2, 2, pytest.approx(70 * US))
    assert found.dispatch == pytest.approx(5 * US)


def test_sums_of_hosts_are_of_all_devices_whatever_their_clocks_and_files():
    """The second host has the same runs by another clock, 20 us longer on its second device, and one of them less."""
    here, elsewhere = instructions(PROGRAM), instructions(PROGRAM.replace(CELL, "/home/other/cell.py"))
    traces = (
        read_trace(by_hand((100, 300, 500, 700)), {"jit_step"}),
        read_trace(by_hand((9100, 9400, 9500), later=20), {"jit_step"}),
    )
    devices = {0: 0, 1: 1}, {2048: 2, 2049: 3}
    traces = (
        traces[0],
        replace(traces[1], ops=tuple(op._replace(device=2048 + op.device) for op in traces[1].ops)),
    )
    every = longest([run_durations(trace, of) for trace, of in zip(traces, devices, strict=True)])
    assert every == {0: pytest.approx(90e3), 1: pytest.approx(90e3)}  # ns of the runs that both have
    own, other = (
        host_totals(trace, told, of, every) for trace, told, of in zip(traces, (here, elsewhere), devices, strict=True)
    )
    found = time_breakdown([own, HostTotals.from_json(other.to_json()).with_local_files(here)], NOTHING)
    assert {row.line: row for row in found.lines} == {
        3: row(3, "forward", compute=(10 + 22) / 2),
        4: row(4, "forward", moving=(5 + 8) / 2, waiting=5 / 2),
        5: row(5, "backward", compute=4),
        6: row(6, "backward", compute=10 + 16),
        7: row(7, "update", waiting=(4 + 10) / 2, host=(4 + 10) / 2),
        8: row(8, "recomputed", compute=(10 + 0 + 10 + 20) / 4),
    }
    assert [each.device for each in found.devices] == [0, 1, 2, 3]
    assert [each.idle for each in found.devices] == pytest.approx([26 * US, 20 * US, 26 * US, 0], abs=1e-9)
    assert (found.recorded, found.read, found.step_s.median) == (3, 2, pytest.approx(90 * US))
    # They compute 50, 52, 50 and 72 us: half of 50 + 52 is the median.
    assert (found.slowest, found.behind) == (3, pytest.approx(21 * US))
    assert [lane.device for lane in found.lanes] == [0, 1, 2, 3]
    assert [lane.starts[0] for lane in found.lanes] == [0, 0, 0, 0]
    assert found.dispatch == pytest.approx(5 * US)
    last = found.lanes[3]
    assert (last.starts[-1] + last.takes[-1]) * found.tick == pytest.approx(90 * US, rel=1e-3)
    assert [found.lines[i].line for i in last.of] == [3, 4, 6, 5, 6, 5, 7, 8]


def test_lines_and_what_is_idle_are_the_step():
    found = measured(by_hand(), PROGRAM, {0: 0, 1: 1})
    assert sum(row.seconds for row in found.lines) + found.mean.idle == pytest.approx(70 * US)


def test_bandwidth_is_what_is_sent_over_the_seconds_that_it_moves():
    gather = "all-gather", ("data",)
    rates = StepPredictions({gather: 4000}, {gather: 3e-6}, {"data": 9e9}, {(CELL, 3, "forward"): 12e-6})
    found = measured(by_hand(), PROGRAM, {0: 0, 1: 1}, rates)
    (moved,) = found.collectives
    assert moved.bandwidth == pytest.approx(4000 / (8 * US))
    assert (moved.link, moved.predicted) == (9e9, 3e-6)
    assert {row.line: row.predicted for row in found.lines}[3] == 12e-6


def test_devices_have_the_ids_of_the_mesh_and_others_are_left_out():
    found = measured(by_hand(), PROGRAM, {1: 7})
    assert [each.device for each in found.devices] == [7]
    assert found.slowest is None


def test_of_many_operations_the_last_whole_calls_are_read():
    xspace = by_hand((100, 300, 500, 700))
    every = read_trace(xspace, {"jit_step"})
    assert (every.recorded, every.runs) == (3, 3)
    fewer = read_trace(xspace, {"jit_step"}, most=2 * len(every.ops) // 3)
    assert (fewer.recorded, fewer.runs) == (3, 1)  # what may be an operation counts, others' too
    assert {op.start for op in fewer.ops} == {op.start for op in every.ops if op.start > 600_000}
    assert read_trace(xspace, {"jit_step"}, most=1).runs == 1


def test_a_recording_without_a_call_is_refused():
    with pytest.raises(ValueError, match="no call of the step"):
        read_trace(by_hand((100,)), {"jit_step"})


ACCELERATOR = program(
    f"""ENTRY %main (a: f32[4]) -> f32[8] {{
  %a = f32[4] parameter(0)
  %all-gather-start.1 = (f32[4], f32[8]) all-gather-start(%a), {GATHER}, {at(4, "jvp()/gather")}
  %dot.1 = f32[4] multiply(%a, %a), {at(3, "jvp()/dot_general")}
  ROOT %all-gather-done.1 = f32[8] all-gather-done(%all-gather-start.1), {at(4, "jvp()/gather")}
}}
"""
)


@pytest.mark.parametrize("name", ["hlo_op", "text"])
@pytest.mark.parametrize(("plane", "line"), [("/device:TPU:0", "XLA Ops"), ("/device:GPU:0", "Stream #14(Compute)")])
def test_on_an_accelerator_a_collective_lasts_from_its_start_to_its_end(plane, line, name):
    def on(op: str, start: float, end: float) -> Event:
        if name == "text":
            return Event(f"%{op} = f32[8] {op}(%a)", start, end, {"flops": 3})
        return Event("a_kernel", start, end, {"hlo_op": op, "hlo_module": "jit_step"})

    def run(base: float) -> list[Event]:
        return [
            on("all-gather-start.1", base, base + 1),
            on("dot.1", base + 1, base + 9),
            on("all-gather-done.1", base + 9, base + 14),
        ]

    xspace = recorded(
        {
            plane: {line: [*run(100), *run(200)], "XLA Modules": [Event("jit_step", 100, 114)]},
            "/host:CPU": {"python": [call(90, 120), call(190, 220)]},
        }
    )
    found = measured(xspace, ACCELERATOR, {0: 0})
    assert {row.line: row for row in found.lines} == {
        3: row(3, "forward", compute=8, waiting=None),
        4: row(4, "forward", moving=1 + 5, waiting=None),  # what nothing hides
    }
    (busy,) = found.devices
    assert (busy.overlap, busy.idle) == (pytest.approx(8 * US), 0)
    (gather,) = found.collectives
    assert (gather.seconds, gather.waiting) == (pytest.approx(14 * US), None)


def test_a_tpu_operation_belongs_to_the_program_during_which_it_runs():
    """A plane as a TPU's: operations that name no program, programs with a number behind their names. Between two steps
    another program runs an instruction of the same name, for longer than the step does."""

    def ran(name: str, start: float, end: float) -> Event:
        return Event(f"%{name} = f32[8] {name}(%a)", start, end, {"flops": 3})

    def run(base: float) -> list[Event]:
        return [ran("dot.1", base, base + 9), ran("dot.1", base + 20, base + 70)]

    bases = (100, 200, 300)
    modules = [(Event("jit_step(7712)", b, b + 9), Event("jit_evaluate(90)", b + 20, b + 70)) for b in bases]
    plane = {
        "Steps": [Event(str(n), base, base + 70) for n, base in enumerate(bases)],
        "XLA Modules": [event for each in reversed(modules) for event in each],
        "XLA Ops": [event for base in bases for event in run(base)],
    }
    calls = {"python": [call(base - 2, base + 15) for base in bases]}
    xspace = recorded({"/device:TPU:0": plane, "/host:CPU": calls})
    found = measured(xspace, ACCELERATOR, {0: 0})
    assert {row.line: row for row in found.lines} == {3: row(3, "forward", compute=9, waiting=None)}
    assert (found.read, found.step_s.max, found.unknown) == (2, pytest.approx(9 * US), None)
    every = read_trace(xspace, {"jit_step", "jit_evaluate"})
    assert [(op.run, op.module) for op in every.ops] == [
        *((0, "jit_step"), (0, "jit_evaluate")),
        *((1, "jit_step"), (1, "jit_evaluate")),
    ]
    assert len({op.launch for op in every.ops}) == 4  # executions are told apart


def test_time_of_several_belongs_to_the_lowest_rank_and_is_shared_by_equals():
    parts = [(0, 10, 1), (2, 4, 0), (3, 6, 0), (12, 13, 3)]
    assert [(d.start, d.end, d.owners) for d in divide_by_rank(parts)] == [
        (0, 2, (0,)),
        (2, 3, (1,)),
        (3, 4, (1, 2)),
        (4, 6, (2,)),
        (6, 10, (0,)),
        (12, 13, (3,)),
    ]


def test_what_lies_in_another_takes_its_time():
    assert innermost([(0, 8, "a"), (1, 7, "b"), (2, 3, "c"), (9, 10, "d")]) == [
        (0, 1, "a"),
        (1, 2, "b"),
        (2, 3, "c"),
        (3, 7, "b"),
        (7, 8, "a"),
        (9, 10, "d"),
    ]


def test_what_begins_in_another_and_ends_after_it_takes_the_time_from_its_start():
    assert innermost([(0, 5, "a"), (4, 9, "b"), (8.5, 12, "c"), (9, 10, "d")]) == [
        (0, 4, "a"),
        (4, 8.5, "b"),
        (8.5, 9, "c"),
        (9, 10, "d"),
        (10, 12, "c"),
    ]


FUSED = program(
    f"""%fused (p: f32[4]) -> f32[4] {{
  %p = f32[4] parameter(0)
  ROOT %multiply.2 = f32[4] multiply(%p, %p), {at(3, "jvp()/mul")}
}}

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4] parameter(0)
  %loop_multiply_fusion.7 = f32[4] fusion(%a), kind=kLoop, calls=%fused, {at(3, "jvp()/mul")}
  %custom-call.1 = f32[4] custom-call(%loop_multiply_fusion.7), custom_call_target="cublas", {at(4, "jvp()/dot")}
  %custom-call.2 = f32[4] custom-call(%custom-call.1), custom_call_target="cublas", {at(5, "jvp()/dot")}
  ROOT %loop_multiply_fusion.8 = f32[4] fusion(%custom-call.2), kind=kLoop, calls=%fused, {at(6, "jvp()/mul")}
}}
"""
)


def test_kernels_of_a_cuda_graph_have_the_lines_of_their_instructions():
    """A stream as XLA leaves it on an H100: a kernel begins before the one in front has ended, those of a graph name
    the graph, and kernels of libraries have C++ names."""

    def kernel(name: str, start: float, end: float, op: str = "command_buffer_3", **graph: int) -> Event:
        return Event(name, start, end, {**graph, "hlo_op": op, "hlo_module": "jit_step"})

    def run(base: float) -> list[Event]:
        return [
            kernel("loop_multiply_fusion_7", base, base + 10, cuda_graph_id=34),
            kernel("void cutlass::Kernel2<gemm>(gemm::Params)", base + 9, base + 30, "custom-call.1"),
            kernel("Memset 0", base + 30, base + 32, cuda_graph_id=34),
        ]

    stream = {"Stream #14(Compute,Memset)": [*run(100), *run(200)]}
    calls = {"python": [call(90, 135), call(190, 240)]}
    found = measured(recorded({"/device:GPU:0": stream, "/host:CPU": calls}), FUSED, {0: 0})
    assert {row.line: row for row in found.lines} == {
        3: row(3, "forward", compute=9, waiting=None),
        4: row(4, "forward", compute=21, waiting=None),
    }
    assert found.unknown is not None and found.unknown.compute == pytest.approx(2 * US)
    (busy,) = found.devices
    assert (busy.compute, busy.idle) == (pytest.approx(32 * US), 0)


def test_kernels_of_libraries_in_a_graph_are_of_the_calls_between_known_kernels():
    """The first call launches one kernel, the last one two; what fills memory may be XLA's own."""

    def run(base: float) -> list[Event]:
        names = (
            "loop_multiply_fusion_7",
            "Memset 0",
            "nvjet_a",
            "nvjet_b",
            "splitKreduce",
            "loop_multiply_fusion_8",
        )
        stats = {"cuda_graph_id": 34, "hlo_op": "command_buffer_3", "hlo_module": "jit_step"}
        return [Event(name, base + 10 * i, base + 10 * i + i + 1, stats) for i, name in enumerate(names)]

    stream = {"Stream #14(Compute,Memset)": [*run(100), *run(200)]}
    calls = {"python": [call(90, 170), call(190, 270)]}
    found = measured(recorded({"/device:GPU:0": stream, "/host:CPU": calls}), FUSED, {0: 0})
    assert {line.line: round(line.compute / US) for line in found.lines} == {3: 1, 4: 3, 5: 4 + 5, 6: 6}
    assert found.unknown is not None and found.unknown.compute == pytest.approx(2 * US)


def test_lanes_are_few_pieces_that_keep_the_time_of_each_kind():
    key = (CELL, 3, "forward")
    pieces = [
        LanePiece(2 * i, 2 * i + 2, key if i % 10 else (CELL, 4, "backward"), "cm"[i % 10 == 0]) for i in range(20_000)
    ]
    drawn = lanes_of(dict.fromkeys(range(40), pieces), (0, 40_000), {key: 0}, 5)
    assert sum(len(lane.starts) for lane in drawn.lanes) <= MOST_PIECES
    assert 5 in [lane.device for lane in drawn.lanes] and len(drawn.lanes) == 8
    for lane in drawn.lanes:
        assert sum(lane.takes) * drawn.tick == pytest.approx(40_000e-9, rel=0.01)
        assert len(lane.starts) == len(lane.takes) == len(lane.of) == len(lane.kinds)


def test_lanes_of_few_pieces_are_exact():
    key = (CELL, 3, "forward")
    pieces = [
        LanePiece(0, 500, key, "c"),
        LanePiece(500, 700, (None, None, None), "m"),
        LanePiece(900, 2000, key, "w"),
    ]
    (lane,) = lanes_of({3: pieces}, (0, 2000), {key: 4}, None).lanes
    assert (lane.device, lane.starts, lane.takes, lane.of, lane.kinds) == (
        3,
        (0, 500, 900),
        (500, 200, 1100),
        (4, -1, 4),
        "cmw",
    )
