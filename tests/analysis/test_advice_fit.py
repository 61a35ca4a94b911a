"""What would make a step fit: each change is told where it helps, with what it leaves, the cheapest first."""

import math
from dataclasses import replace

from jaxshard_magic.analysis.advice import Case, advise
from jaxshard_magic.config.options import GradientOptions
from jaxshard_magic.hardware import chip
from jaxshard_magic.report import Buffer, DeviceMemory, Leaf, Memory, MeshInfo
from jaxshard_magic.targets import Target
from jaxshard_magic.targets.slices import larger_sizes

GIB = 2**30
V5E8 = Target(chip("v5e"), (2, 4))


def leaf(path: str, nbytes: int, spec, role: str, parts: int = 1) -> Leaf:
    return Leaf(path, role, (1024, nbytes // 4096), "float32", spec, nbytes, nbytes // parts, "")


def case(temporaries: int, *, weights: int = GIB, axes=None, buffers=None, limit: int = 16 * GIB, **more) -> Case:
    """Weights cut along data, 64 examples, and so many bytes of temporaries."""
    axes = axes or {"data": 8}
    cut = tuple(axes)[:1]
    leaves = (
        leaf("w", 8 * weights, (cut[0], None), "params", 8),
        leaf("x", 4096 * 64, (cut[0], None), "batch", 8),
    )
    held = DeviceMemory(0, weights, 0, 32 * 1024, 0, temporaries, weights + 32 * 1024 + temporaries, limit)
    info = MeshInfo(axes, "tpu", "TPU v5 lite", "topology", tuple(range(math.prod(axes.values()))), 2)
    given = {"jobs": {"fsdp": cut}, "examples": 64} | more
    return Case(
        leaves=leaves,
        mesh=info,
        strategy="fsdp",
        memory=Memory((held,), "compiled", buffers=buffers),
        **given,
    )


def told(made: Case, code: str):
    return [a for a in advise(made) if a.code == code]


def test_a_larger_slice_divides_what_lies_along_the_batch_axis():
    # (1 + 23 GiB) on 8 devices; on 16 half of it, 12 GiB.
    made = case(23 * GIB, target=V5E8, larger=larger_sizes(V5E8.chip, V5E8.extent))
    (first,) = told(made, "does-not-fit")
    assert first.fix == "%mesh v5e:4x4 data=16"
    assert "it would need about 12.0\u202fGiB: enough" in first.message
    assert "needs 24.0\u202fGiB on a device that has 16\u202fGiB: 8.00\u202fGiB too much" in first.message


def test_a_slice_is_as_large_as_it_must_be_and_keeps_the_other_axes():
    # 79 GiB of temporaries and 1 GiB of weights: a fifth must be left, so 8 times the devices.
    made = case(79 * GIB, axes={"data": 4, "model": 2}, target=V5E8, larger=larger_sizes(V5E8.chip, V5E8.extent))
    (first,) = told(made, "does-not-fit")
    assert first.fix == "%mesh v5e:8x8 data=32 model=2"


def test_what_is_as_large_however_few_examples_there_are_is_not_counted_on():
    # Of 23 GiB 13 are a weight's gradient and its gathered form: beside them and 1 GiB of weights 0.4 of 10 may stay.
    kept = (
        Buffer(8 * GIB, 1, "f32", (8,), "gradient of w", "backward", of="w"),
        Buffer(5 * GIB, 1, "f32", (8,), "w, gathered", "backward", of="w"),
    )
    made = case(23 * GIB, buffers=kept, gradient_options=GradientOptions())
    assert not [a for a in advise(made) if "--microbatches" in (a.fix or "") or "examples in a batch" in a.message]


def test_fewer_examples_leave_room_in_steps_of_the_devices():
    # 10.4 of 23 GiB of temporaries may stay beside 4 GiB of weights, a tenth left free: 64 * 10.4 / 23 = 28.9, so 24.
    (first,) = told(case(23 * GIB, weights=4 * GIB), "does-not-fit")
    assert first.fix is None
    assert "With 24 of the 64 examples in a batch it would need about 12.6\u202fGiB: enough." in first.message


def test_what_is_kept_for_the_backward_pass_is_told_with_its_lines():
    kept = (
        Buffer(12 * GIB, 4, "bf16", (24, 8, 16), "dot_general", "forward", "cell [3]", 7),
        Buffer(6 * GIB, 1, "bf16", (24, 8, 16), "exp", "forward", "cell [3]", 6),
        Buffer(2 * GIB, 1, "f32", (8, 16), "add", "backward", "cell [3]", 9),
    )
    made = case(23 * GIB, buffers=kept, gradient_options=GradientOptions())
    (change,) = [a for a in told(made, "would-fit") if a.fix == "--remat full"]
    assert change.message.startswith("18.0\u202fGiB of cell [3], lines 6 and 7 are kept for the backward pass")
    for inside in (None, GradientOptions(remat="dots")):
        made = case(23 * GIB, buffers=kept, gradient_options=inside)
        assert not [a for a in advise(made) if a.fix == "--remat full"]
    few = (*kept[:1], Buffer(20 * GIB, 1, "f32", (8, 16), "add", "backward", "cell [3]", 9))
    assert not [
        a for a in advise(case(23 * GIB, buffers=few, gradient_options=GradientOptions())) if a.fix == "--remat full"
    ]


def test_the_fewest_microbatches_that_leave_room_come_before_more_devices():
    # 8 examples a device. Beside 1 GiB of weights and as much for the sums of gradients 12.4 of 16 GiB are left, a
    # tenth of them free: of 22 a half fits, of 45 a quarter; of 23 that 2 microbatches have, with their sums, a half.
    for inside, temporaries, fix, need in (
        (GradientOptions(), 23, 2, "13.0"),
        (GradientOptions(), 46, 4, "13.3"),
        (GradientOptions(microbatches=2), 23, 4, "12.5"),
    ):
        made = case(
            temporaries * GIB,
            target=V5E8,
            larger=larger_sizes(V5E8.chip, V5E8.extent),
            gradient_options=inside,
        )
        (first,) = told(made, "does-not-fit")
        assert first.fix == f"--microbatches {fix}"
        assert f"would need about {need}\u202fGiB: enough." in first.message
    assert not [a for a in advise(case(23 * GIB)) if "--microbatches" in (a.fix or "")]
    too_few = case(
        15 * 9 * GIB, gradient_options=GradientOptions()
    )  # 8 microbatches of one example each still need 18.8 GiB
    assert not [a for a in advise(too_few) if "--microbatches" in (a.fix or "")]


def test_a_change_that_was_compiled_is_told_as_compiled():
    fix = "%mesh v5e:4x4 data=16"
    for peak, verdict in (
        (11 * GIB, "Compiled so, it needs 11.0\u202fGiB: it fits."),
        (17 * GIB, "17.0\u202fGiB: still too much."),
    ):
        made = case(23 * GIB, target=V5E8, larger=larger_sizes(V5E8.chip, V5E8.extent), tried={fix: peak})
        assert told(made, "does-not-fit")[0].message.endswith(verdict)


def test_what_takes_off_next_to_nothing_is_not_told():
    kept = (leaf("w", 8 * 2**20, ("data", None), "params", 8),)  # 1 MiB on a device, of 8 GiB too much
    fixes = [a.fix for code in ("does-not-fit", "would-fit") for a in told(case(23 * GIB, undonated_state=kept), code)]
    assert "--donate" not in fixes


def test_a_donation_that_would_help_is_told_once():
    kept = (leaf("w", 64 * GIB, ("data", None), "params", 8),)
    fixes = [a.fix for a in advise(case(23 * GIB, undonated_state=kept))]
    assert fixes.count("--donate") == 1
    (told_,) = (a for a in advise(case(4 * GIB, undonated_state=kept)) if a.fix == "--donate")
    assert (told_.code, told_.saves) == ("not-donated", 1.0), "of the peak, at most all"


def test_a_step_that_fits_is_told_nothing():
    made = case(14 * GIB, target=V5E8, larger=larger_sizes(V5E8.chip, V5E8.extent))
    assert not told(made, "does-not-fit") and not told(made, "would-fit")


def test_what_a_pipeline_can_take_off_is_of_the_fullest_devices_stage():
    # Stage 0 has 1 GiB of weights, stage 1 6 GiB; cut over data=2, of parameters and gradients a half of 6 GiB each.
    axes = {"pipe": 2, "data": 2}
    weights = [
        replace(leaf(f"w{s}", size * GIB, (None, None), "params"), within={"pipe": (s, s + 1)})
        for s, size in ((0, 1), (1, 6))
    ]
    batch = leaf("x", 4096 * 64, ("data", None), "batch", 2)
    held = [(1, 19), (1, 19), (6, 15), (6, 15)]
    rows = tuple(
        DeviceMemory(i, w * GIB, 0, 0, 0, rest * GIB, (w + rest) * GIB, 16 * GIB) for i, (w, rest) in enumerate(held)
    )
    made = replace(
        case(0, axes=axes),
        leaves=(*weights, batch),
        strategy="pp",
        jobs={"pp": ("pipe",)},
        memory=Memory(rows, "compiled"),
    )
    first, *_ = [a for a in advise(made) if "cut over data" in a.message]
    assert "take off up to 6.00\u202fGiB" in first.message
    assert first.fix == "%%shard fsdp+pp"
    fuller = replace(rows[0], temporaries=25 * GIB, peak=26 * GIB)
    first, *_ = [
        a for a in advise(replace(made, memory=Memory((fuller, *rows[1:]), "compiled"))) if "cut over data" in a.message
    ]
    assert "take off up to 1.00\u202fGiB" in first.message
