"""The terminal view: aligned, never wider than asked, and silent about nothing."""

import re
import time
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from support.sample_reports import (
    GIB,
    MIB,
    SAMPLES,
    attached,
    bare,
    changed,
    dry,
    files,
    gpt_leaves,
    large,
    memory,
    mesh,
    noisy,
    one_device,
    partly,
    simulated,
    too_big,
    unknown,
    wrong,
)

from jaxshard_magic.display import writable
from jaxshard_magic.report import Checkpoints, Collective, DeviceMemory, Memory, Report, TimeSpread, Timing
from jaxshard_magic.views import device_memory, figure_marks, words
from jaxshard_magic.views.format import SPACE
from jaxshard_magic.views.terminal import display_width

DATA = Path(__file__).parents[1] / "data"


def verdict(report: Report) -> str:
    return words.verdict(report).text.replace(SPACE, " ")


@pytest.mark.parametrize("name", ["attached", "simulated", "too_big", "noisy", "shapes", "large"])
def test_a_report_reads_as_in_its_golden_file(name: str):
    assert SAMPLES[name]().to_text(80) + "\n" == (DATA / f"report_{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("leaves", [8, "all"])
@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("name", list(SAMPLES))
def test_no_line_is_wider_than_asked_but_a_fix_to_paste(name: str, width: int, leaves: str | int):
    report = SAMPLES[name]()
    fixes = {"    " + line for a in report.advice if a.fix for line in a.fix.splitlines()}
    for line in report.to_text(width, leaves).split("\n"):
        assert display_width(line) <= width or line in fixes
        assert line == line.rstrip()
        assert line.isprintable()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_terminal_that_lacks_signs_gets_others_in_as_many_columns(name: str):
    text = SAMPLES[name]().to_text(80)
    shown = writable(text, TextIOWrapper(BytesIO(), encoding="ascii"))
    assert shown.isascii() and list(map(len, shown.split("\n"))) == list(map(len, text.split("\n")))
    assert writable(text, TextIOWrapper(BytesIO(), encoding="utf-8")) == text


def test_a_name_of_a_hundred_thousand_characters_takes_no_longer_than_others():
    start = time.process_time()
    for sign in "aé漢":
        report = replace(attached(), name=sign * 100_000)
        report.to_text()
        report.to_html()
    assert time.process_time() - start < 5


def test_the_width_stays_between_60_and_100():
    assert attached().to_text(20) == attached().to_text(60)
    assert attached().to_text(500) == attached().to_text(100)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            attached(),
            "Fits: 5.09 of 15.75 GiB on the fullest device. Bound by communication:"
            " 31% of the predicted step is all-gathers over data.",
        ),
        (simulated(), "No memory limit here: 4.63 GiB on every device. 993 MiB sent, most over data."),
        (
            dry(),
            "Would fit: 4.63 of 15.75 GiB on every device. Bound by communication:"
            " 31% of the predicted step is all-gathers over data.",
        ),
        (
            too_big(),
            "Does not fit: 17.2 of 15.75 GiB, 1.46 GiB too much on every device."
            " Largest: f32[16,1024,50257], 3.07 GiB, from cell [7], line 14."
            " 831 MiB sent, all by all-reduces over data.",
        ),
        (one_device(), "Fits: 8.23 of 15.75 GiB. One device: nothing to cut and nothing moves."),
        (unknown(), "Peak memory not known: the arrays take 235 MiB on every device."),
        (bare(), ""),
    ],
)
def test_the_verdict_says_it_in_words(report: Report, said: str):
    assert verdict(report) == said


def test_wrong_numbers_come_before_everything_else():
    said = verdict(wrong())
    assert said.startswith(
        "Not the same numbers: differs by 4.3e\u22124, limit 1e\u22124; first in params.wte.embedding. Fits:"
    )
    assert not words.verdict(wrong()).ok


def test_what_does_not_fit_is_never_rounded_into_fitting():
    limit = 16128 * MIB
    for peak, word in [(limit + 1, "Does not fit"), (limit, "Fits"), (limit - 1, "Fits")]:
        one = Memory((DeviceMemory(0, 0, 0, 0, 0, peak, peak, limit),), "compiled")
        assert verdict(replace(attached(), memory=one)).startswith(word)
    almost = Memory((DeviceMemory(0, 0, 0, 0, 0, 0, int(15.6 * GIB), limit),), "compiled")
    assert verdict(replace(attached(), memory=almost)).startswith("Fits: 15.6 of 15.75 GiB")


def test_what_does_not_fit_only_while_a_save_is_written_says_so():
    one = Memory((DeviceMemory(0, 0, 0, 0, 0, 0, 15 * GIB, 16128 * MIB),), "compiled")  # 768 MiB are left
    fits = replace(attached(), memory=one)
    said = verdict(fits)
    for copy, more in [
        (None, ""),
        (768, ""),
        (769, " Not while a save is written, which takes 769 MiB more."),
    ]:
        kept = Checkpoints("runs/a", "100", copy=copy and copy * MIB)
        assert verdict(replace(fits, checkpoints=kept)) == said.replace("15.75 GiB.", "15.75 GiB." + more)


def _sent(*parts: tuple[str, tuple[str, ...] | None, int]) -> str:
    made = tuple(Collective(kind, axes, 4, 1, n * MIB, n * MIB) for kind, axes, n in parts)
    return verdict(replace(bare(), collectives=made))


def test_most_is_said_only_above_half():
    assert (
        _sent(("all-gather", ("data",), 6), ("all-reduce", ("model",), 4))
        == "10.0 MiB sent, most by all-gathers over data."
    )
    assert _sent(("all-gather", ("data",), 5), ("all-reduce", ("model",), 5)) == "10.0 MiB sent."
    kinds = (("all-gather", ("data",), 4), ("reduce-scatter", ("data",), 3), ("all-reduce", ("model",), 4))
    assert _sent(*kinds) == "11.0 MiB sent, most over data."
    assert _sent(("all-reduce", None, 6)) == "6.00 MiB sent, all by all-reduces."


def test_a_figure_that_is_not_known_is_a_dash_and_never_0():
    lines = unknown().to_text(80).split("\n")
    figures = {
        line.split()[0]: line.split()[1] for line in lines if re.match(r"  (step|peak|sent|compile|numbers) ", line)
    }
    assert figures == dict.fromkeys(("step", "peak", "sent", "compile", "numbers"), "-")
    assert any("temporaries -" in line for line in lines)


def test_simulated_devices_say_what_their_figures_mean():
    text = " ".join(simulated().to_text(80).split())
    assert "exact for the program compiled for this CPU; a chip's own may send otherwise" in text
    assert "Times on this CPU say nothing about an accelerator; --on v5e predicts one." in text
    assert "step - 1.84 s on this CPU, over all 3 calls but one" in text
    assert "accelerator" not in attached().to_text(80)


@pytest.mark.parametrize(
    ("source", "timing", "said"),
    [
        (
            "attached",
            Timing(6.8, 1000, 999, TimeSpread(46.8e-3, 47.3e-3, 49.1e-3), how="step to step"),
            (
                "step time, measured",
                "47.3 ms",
                "46.8 to 49.1 ms from step to step, over all 1,000 calls but one",
            ),
        ),
        (
            "attached",
            Timing(6.8, 1000, 24, TimeSpread(0.05, 0.05, 0.06), 46e-3, how="start to end", apart_s=0.35, others=2),
            (
                "step time, measured",
                "50.0 ms",
                "50.0 to 60.0 ms from start to end, over 24 of 1,000 calls, 2 of another program, "
                "350 ms from call to call, predicted 46.0 ms",
            ),
        ),
        (
            "attached",
            Timing(6.8, 20, 20, TimeSpread(0.05, 0.05, 0.06), apart_s=0.08, data_share=0.4),
            (
                "step time, measured",
                "50.0 ms",
                "50.0 to 60.0 ms, over all 20 calls, 80.0 ms from call to call, 40% waiting for data",
            ),
        ),
        (
            "attached",
            Timing(6.8, 1, 3, TimeSpread(0.05, 0.05, 0.06), how="copies"),
            ("step time, measured", "50.0 ms", "50.0 to 60.0 ms, over 3 calls on copies"),
        ),
        (
            "attached",
            Timing(6.8, 1, 1, TimeSpread(0.05, 0.05, 0.05)),
            ("step time, measured", "50.0 ms", "one call"),
        ),
        (
            "simulated",
            Timing(6.8, 20, 19, TimeSpread(1.7, 1.8, 1.9), 46e-3, on="TPU v5e", how="step to step"),
            ("step time, predicted", "46.0 ms", "for TPU v5e, 1.80 s on this CPU, over all 20 calls but one"),
        ),
        (
            "topology",
            Timing(6.8, 0, 0, None, 46e-3, on="TPU v5e"),
            ("step time, predicted", "46.0 ms", "for TPU v5e, not run"),
        ),
        ("simulated", Timing(6.8, 1, 0, None), ("step time", "\u2013", "not timed")),
    ],
)
def test_a_step_time_is_a_chips_and_says_how_it_was_measured_over_which_calls(source, timing, said):
    report = replace(attached(), mesh=mesh({"data": 8}, source), timing=timing)
    figure, mark = words.key_figures_of(report)[0], figure_marks.marks(report)[0]
    assert tuple(part.replace("\u202f", " ") for part in (figure.label, figure.value, figure.note)) == said
    assert (mark is not None) == (said[0] == "step time, measured")  # no axis has a CPU's time on it


def test_what_was_not_run_says_so():
    assert "Not run: compiled only; your variables are as they were." in dry().to_text(80)
    assert "Not run: your variables are as they were." in bare().to_text(80)
    assert "Not run" not in attached().to_text(80)


def test_noise_is_named_and_is_no_error():
    text = noisy().to_text(80)
    assert "2 leaves with rounding noise only, no error:\n  state.params.attn.key.bias (all 768 numbers)\n" in text
    assert "  state.opt_state[0].mu.attn.key.bias (12 of 768 numbers)\n" in text + "\n"
    assert words.verdict(noisy()).ok


def test_wrong_leaves_are_named():
    assert "2 leaves not the same:\n  params.wte.embedding\n  params.blocks.mlp.up.kernel" in wrong().to_text(80)


@pytest.mark.parametrize(("compiler", "said"), [(True, "the compiler's"), (False, "please report it"), (None, "")])
def test_wrong_leaves_are_followed_by_whose_fault_they_are(compiler: bool | None, said: str):
    report = wrong()
    assert report.check is not None
    checked = replace(report.check, compiler=compiler)
    told = [line for line, _ in words.check_lines(replace(report, check=checked))]
    assert any("jax.jit alone" in line and said in line for line in told) == (compiler is not None)


def block(report: Report, head: str) -> list[str]:
    """The lines under the heading that begins with `head`."""
    found = next(part for part in report.to_text(100).split("\n\n") if part.startswith(head))
    return found.split("\n")


def test_lines_that_move_data_are_listed_heaviest_first():
    head, *rows = block(attached(), "Lines that move data")
    assert head.split()[-3:] == ["predicted", "sent", "collectives"]
    assert [row.split()[0] for row in rows] == [
        "[7]:14", "gpt2.py:31", "gpt2.py:38", "gpt2.py:44", "gpt2.py:46", "[7]:9", "[7]:15",
    ]  # fmt: skip
    assert 'qkv = h @ p["attn"]["' in rows[1] and "\u2026  # from [7]:12  " in rows[1]
    assert rows[1].endswith("8.98 ms   326 MiB  RS data  AR model  AG data")
    assert "predicted" not in block(simulated(), "Lines that move data")[0]


def test_lines_of_several_files_are_told_with_the_file():
    _, *rows = block(files(), "Lines that move data")
    assert "  [12]:20  x20 = f(x19, 20) " in rows[0]
    assert " model.py:31  h4 = self.dense(h3, 4) " in rows[1]


def test_what_no_line_is_known_of_is_listed_as_such():
    rows = block(partly(), "Lines that move data")
    assert any(row.split()[:3] == ["-", "not", "traced"] and "\u226520.6 MiB" in row for row in rows)
    assert block(changed(), "Lines")[-1].endswith("gpt2.py: this file has changed since the step was traced")


def test_lines_are_left_out_where_none_is_known():
    assert "Lines that move data" not in too_big().to_text(80)


def test_the_predicted_step_is_cut_into_its_parts():
    head, compute, gather, *_ = block(attached(), "Predicted step")
    assert head == "Predicted step, 46.0 ms"
    assert compute.split()[:4] == ["compute", "17.6", "ms", "38%"]
    assert gather.split()[:5] == ["all-gather", "data", "14.3", "ms", "31%"]
    assert "Predicted step" not in simulated().to_text(80)


def test_devices_within_one_percent_share_a_bar():
    sizes = [1000, 991, 989, 1000, 500]
    rows = tuple(DeviceMemory(d, 0, 0, 0, 0, n, n, None) for d, n in enumerate(sizes))
    assert [g.devices for g in device_memory.groups(Memory(rows, "compiled"))] == [(0, 1, 3), (2,), (4,)]


def test_devices_with_one_peak_but_other_roles_keep_their_own_bars():
    rows = (DeviceMemory(0, 600, 0, 0, 0, 400, 1000, None), DeviceMemory(1, 400, 0, 0, 0, 600, 1000, None))
    assert len(device_memory.groups(Memory(rows, "compiled"))) == 2


def test_512_devices_are_three_bars():
    said = words.memory_sentence(large().memory or pytest.fail("no memory")).replace(SPACE, " ").replace("\u00a0", " ")
    assert said == (
        "device 17 is fullest, 10.8 of 15.75 GiB; devices 0 to 16, 18 to 63 are alike at 9.93 GiB;"
        " devices 64 to 511 are alike at 8.56 GiB"
    )


def test_the_limit_stands_at_its_place_in_the_bar():
    half = Memory((DeviceMemory(0, 0, 0, 0, 0, GIB, GIB, 2 * GIB),), "compiled")
    line = next(x for x in replace(attached(), memory=half).to_text(80).split("\n") if x.endswith("1.00 of 2 GiB"))
    drawn = line.split()[1]
    assert drawn[-1] == "|"
    assert drawn.count("\u2592") == round(len(drawn) / 2)


def test_nothing_that_moves_is_said_and_what_is_not_known_is_left_out():
    assert "nothing moves between devices" in one_device().to_text(80)
    assert "Communication" not in unknown().to_text(80)


def test_alike_devices_of_a_dry_run_have_one_bar():
    alike = memory(gpt_leaves(), 8, 100, None)
    assert len(device_memory.groups(alike)) == 1
