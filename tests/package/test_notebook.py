"""The committed notebooks in a real kernel: they run, what they saved can be read without one, their prose is true."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from support.saved_notebooks import SCRIPT, assert_as_it_ran

from jaxshard_magic import Report
from jaxshard_magic.targets import tpu
from jaxshard_magic.views.widget_page import MIME

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATH = NOTEBOOKS / "01_quickstart.ipynb"
FIT = NOTEBOOKS / "02_will_it_fit.ipynb"
MADE = NOTEBOOKS / "03_make_it_fit.ipynb"
PIPED = NOTEBOOKS / "04_pipelines.ipynb"
NAMES = ("cnn_dp", "cnn_fsdp", "gpt_dp", "gpt_fsdp", "gpt_tp", "gpt_both", "gpt_257", "gpt_264")
FIT_NAMES = ("under_dp", "under_fsdp", "long_text", "with_remat")
OPTIONS = ("plain", "microbatches", "remat_full", "remat_mlp", "bf16", "together")
MADE_NAMES = (*OPTIONS, "checked", "checked_bf16", "padded")


def saved(path=PATH):
    return nbformat.read(path, 4)


def executed(path, names, folder):
    """A notebook run by the script that saves it, and its Reports by name."""
    notebook = saved(path)
    wanted = f"import json\nprint(json.dumps({{name: globals()[name].to_dict() for name in {names!r}}}))"
    notebook.cells.append(nbformat.v4.new_code_cell(wanted))
    done = SCRIPT["executed"](notebook, folder)
    reports = json.loads(done.cells.pop().outputs[0].text)
    return done, SimpleNamespace(**{name: Report.from_dict(report) for name, report in reports.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return executed(PATH, NAMES, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    if (missing := tpu.missing()) is not None:
        pytest.skip(str(missing))
    return executed(FIT, FIT_NAMES, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    if not os.environ.get("JAXSHARD_NOTEBOOKS"):
        pytest.skip("a quarter of an hour of compiles: set JAXSHARD_NOTEBOOKS=1 to run it")
    if (missing := tpu.missing()) is not None:
        pytest.skip(str(missing))
    return executed(MADE, MADE_NAMES, tmp_path_factory.mktemp("notebook"))


def shown(notebook):
    """The forms in which each sharded cell shows its report; a cell that ends in a semicolon shows none. It comes
    last: the view of a training, where that takes seconds, stands before it."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and re.search("^%%?shard", c.source, re.M)]
    kinds = ("display_data", "execute_result")
    return [[o.data for o in cell.outputs if o.output_type in kinds] for cell in cells if not cell.source.endswith(";")]


def printed(cell):
    """What a cell printed; a busy kernel sends a line in several parts."""
    return "".join(o.text for o in cell.get("outputs", ()) if o.output_type == "stream")


@pytest.mark.parametrize("which", ["saved", pytest.param("run", marks=pytest.mark.ci)])
def test_every_sharded_cell_shows_a_report_as_text_and_as_html_without_script(which, request):
    found = shown(saved() if which == "saved" else request.getfixturevalue("run")[0])
    assert len(found) == 8
    for *views, forms in found:
        assert len(views) <= (which == "run"), "as it is saved no training took seconds"
        assert set(forms) == {"text/plain", "text/html", MIME}
        assert "simulated CPU devices" in forms["text/plain"]
        assert "<svg" in forms["text/html"]
        assert "<script" not in forms["text/html"]


@pytest.mark.parametrize("path", [PATH, FIT, MADE, PIPED], ids=lambda path: path.stem)
def test_a_saved_notebook_holds_nothing_of_the_machine_that_ran_it(path):
    assert_as_it_ran(path)


def test_a_folder_of_this_machine_is_found_in_an_output():
    warning = nbformat.v4.new_output("stream", name="stderr", text=f"ok\n{PATH}:1: UserWarning")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[warning])])
    assert SCRIPT["machine_paths"](notebook) == [f"{PATH}:1: UserWarning"]


def state(report):
    return max(device.params + device.optimizer for device in report.memory.per_device)


def most(report, role):
    return max(getattr(device, role) for device in report.memory.per_device)


def sent(report, axis):
    return sum(move.wire_bytes for move in report.collectives if axis in move.axes)


def kinds(report):
    return {(move.kind, move.axes) for move in report.collectives}


def cut(report, path):
    return next(leaf for leaf in report.leaves if leaf.path.endswith(path)).spec


def fixes(report):
    return {advice.code: advice.fix for advice in report.advice}


CLAIMS = {
    # Part 1
    "parameters (`params`) and twice as much for Adam's two moments (`optimizer`), in full on each device": (
        lambda r: (
            most(r.cnn_dp, "params") == sum(x.bytes for x in r.cnn_dp.leaves if x.role == "params")
            and most(r.cnn_dp, "optimizer") == pytest.approx(2 * most(r.cnn_dp, "params"), rel=0.01)
        )
    ),
    "Most of `other` is the new state": lambda r: most(r.cnn_dp, "other") == pytest.approx(state(r.cnn_dp), rel=0.01),
    "`--donate` lets the step reuse the memory": lambda r: fixes(r.cnn_dp)["not-donated"] == "--donate",
    "nothing but all-reduces over `data`": lambda r: kinds(r.cnn_dp) == {("all-reduce", ("data",))},
    "`f32[128@data,8,8,1]` is a float32 array whose first dimension": lambda r: (
        cut(r.cnn_dp, "batch.x") == ("data", None, None, None) and r.cnn_dp.mesh.axes == {"data": 8}
    ),
    "No weight is cut": lambda r: not any(any(x.spec) for x in r.cnn_dp.leaves if x.role == "params"),
    "**Same numbers**, the last figure: yes": lambda r: r.cnn_fsdp.check.passed,
    "`params` and `optimizer` are about an eighth of what they were": lambda r: (
        7 < state(r.cnn_dp) / state(r.cnn_fsdp) < 8
    ),
    "`temporaries` are more": lambda r: most(r.cnn_fsdp, "temporaries") > most(r.cnn_dp, "temporaries"),
    "all-gathers are new": lambda r: ("all-gather", ("data",)) in kinds(r.cnn_fsdp) - kinds(r.cnn_dp),
    "The gradients are summed as under `dp`": lambda r: (
        {(m.kind, m.bytes, m.count) for m in r.cnn_dp.collectives}
        <= {(m.kind, m.bytes, m.count) for m in r.cnn_fsdp.collectives}
    ),
    "`hidden.kernel` is cut over `data`": lambda r: cut(r.cnn_fsdp, "hidden.kernel") == ("data", None),
    "Arrays of less than 16,384 elements stay whole": lambda r: (
        {x.path.split(".")[-2] for x in r.cnn_fsdp.leaves if x.role == "params" and any(x.spec)} == {"conv2", "hidden"}
    ),
    # Part 2
    "nothing uses `model`": lambda r: all(
        fixes(x)["idle-axis"] == "--mesh data=8" and not sent(x, "model") for x in (r.gpt_dp, r.gpt_fsdp)
    ),
    "**Training**: the curves of the loss and of the time of a step": lambda r: (
        {"loss", "step_s"} <= {curve.name for curve in r.gpt_dp.metrics.curves}
    ),
    "19.7 MiB of parameters and optimizer on each device": lambda r: round(state(r.gpt_dp) / 2**20, 1) == 19.7,
    "for example `f32[256,1024@data]`": lambda r: cut(r.gpt_fsdp, "up.kernel") == (None, "data"),
    "two devices hold the same part": lambda r: (
        not any("model" in axes for x in r.gpt_fsdp.leaves for axes in x.spec if axes)
    ),
    "about a quarter of `dp`'s parameters and optimizer": lambda r: 3.8 < state(r.gpt_dp) / state(r.gpt_fsdp) <= 4,
    "about twice what `dp` sends": lambda r: 1.8 < sent(r.gpt_fsdp, "data") / sent(r.gpt_dp, "data") < 2.2,
    "`up.kernel` is `f32[256,1024@model]`, `down.kernel` is `f32[1024@model,256]`": lambda r: (
        cut(r.gpt_tp, "up.kernel") == (None, "model") and cut(r.gpt_tp, "down.kernel") == ("model", None)
    ),
    "The batch is still divided over `data`": lambda r: cut(r.gpt_tp, "batch.x") == ("data", None),
    "all-reduces over `model`": lambda r: ("all-reduce", ("model",)) in kinds(r.gpt_tp) - kinds(r.gpt_dp),
    "each device has only half of them": lambda r: 1.9 < sent(r.gpt_dp, "data") / sent(r.gpt_tp, "data") < 2.1,
    "**No warning**: both axes have work": lambda r: all(
        advice.level == "info" for x in (r.gpt_tp, r.gpt_both) for advice in x.advice
    ),
    "lines both ways, `f32[256@data,1024@model]`": lambda r: cut(r.gpt_both, "up.kernel") == ("data", "model"),
    "the least `params` and `optimizer` of the four": lambda r: (
        state(r.gpt_both) < min(state(r.gpt_dp), state(r.gpt_fsdp), state(r.gpt_tp))
    ),
    "The gathered weights are half as large": lambda r: (
        {m.bytes for m in r.gpt_fsdp.collectives if m.kind == "all-gather"}
        == {2 * m.bytes for m in r.gpt_both.collectives if m.kind == "all-gather"}
    ),
    "`tp` halves the state and the gradients": lambda r: 1.9 < state(r.gpt_dp) / state(r.gpt_tp) < 2.1,
    "holds the least and sends less than `fsdp`": lambda r: (
        sum(m.wire_bytes for m in r.gpt_both.collectives) < sum(m.wire_bytes for m in r.gpt_fsdp.collectives)
    ),
    # Part 3
    "two lines with an i name the two arrays that lie whole on every device": lambda r: (
        [a.message.split()[0] for a in r.gpt_257.advice if a.code == "whole"]
        == ["model.head.kernel", "model.tokens.embedding"]
    ),
    "`head.kernel` and `tokens.embedding` have no line through them": lambda r: (
        cut(r.gpt_257, "head.kernel") == cut(r.gpt_257, "tokens.embedding") == (None, None)
    ),
    "The blocks are cut as before": lambda r: (
        [x.spec for x in r.gpt_257.leaves if ".blocks." in x.path]
        == [x.spec for x in r.gpt_tp.leaves if ".blocks." in x.path]
    ),
    "The usual fix is one line": lambda r: (
        cut(r.gpt_264, "tokens.embedding") == ("model", None) and "whole" not in fixes(r.gpt_264)
    ),
}


@pytest.mark.ci
def test_what_the_prose_says_of_the_pictures_is_in_the_reports(run):
    prose = " ".join(" ".join(c.source for c in saved().cells if c.cell_type == "markdown").split())
    assert [sentence for sentence in CLAIMS if sentence not in prose] == []
    assert [sentence for sentence, holds in CLAIMS.items() if not holds(run[1])] == []


@pytest.mark.ci
def test_the_loss_falls_and_is_the_same_under_every_strategy(run):
    texts = [printed(cell) for cell in run[0].cells]
    told = [[float(x) for x in re.findall(r"\d\.\d+", text)] for text in texts if text.startswith("mean loss")]
    digits, gpt = told[:2], told[2:]
    assert len(gpt) == 4
    for losses in (digits, gpt):
        assert losses[0][-1] < 0.8 * losses[0][0]
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], abs=2e-3)


def test_the_report_shown_again_is_of_the_last_loop_with_measured_lines():
    (again,) = (cell for cell in saved().cells if cell.id == "again")
    text = again.outputs[-1].data["text/plain"]
    assert "over all 10 calls" in text
    assert "5 recorded steps" in text and "Lines by measured time" in text


def device(report):
    return max(report.memory.per_device, key=lambda device: device.peak)


def held(report):
    return device(report).params + device(report).optimizer


FITS = {"dp": False, "fsdp": True, "long": False, "remat": True}
SAID_OF_FIT = {
    "outside it, `nnx.Optimizer` would allocate its two moments, here 3.9 GiB": lambda r: (
        round(device(r.under_dp).optimizer / 2**30, 1) == 3.9
    ),
    "`params` and `optimizer` are 5.8 GiB": lambda r: round(held(r.under_dp) / 2**30, 1) == 5.8,
    "`other` is mostly the new state": lambda r: device(r.under_dp).other == pytest.approx(held(r.under_dp), rel=0.01),
    "`params` and `optimizer` are an eighth of what they were": lambda r: (
        7.9 < held(r.under_dp) / held(r.under_fsdp) <= 8
    ),
    "What is left is mostly `temporaries`": lambda r: (
        device(r.under_fsdp).temporaries > 0.5 * device(r.under_fsdp).peak
    ),
    "The state stays as it was": lambda r: held(r.long_text) == held(r.under_fsdp),
    "most are stacks of 18, one slice for each layer": lambda r: (
        sum(b.bytes * b.count for b in r.long_text.memory.buffers if b.shape[:1] == (18,))
        > 0.5 * sum(b.bytes * b.count for b in r.long_text.memory.buffers)
    ),
    "The first was tried by compiling it: `%%shard fsdp`": lambda r: r.under_dp.advice[0].fix == "%%shard fsdp",
    "It fits, with room for more": lambda r: device(r.with_remat).peak < 0.5 * device(r.with_remat).limit,
    "It costs about a quarter more compute": lambda r: (
        1.15 < r.with_remat.timing.compute_s / r.long_text.timing.compute_s < 1.35
    ),
}


def test_the_saved_answers_are_does_not_fit_then_fits():
    cells = {cell.id: cell for cell in saved(FIT).cells}
    for name, fits in FITS.items():
        (output,) = (o for o in cells[name].outputs if "text/html" in o.get("data", {}))
        assert "<script" not in output.data["text/html"]
        assert ("Would fit:" if fits else "Does not fit:") in output.data["text/plain"]


@pytest.mark.full
def test_what_fits_and_what_the_prose_says_of_it_is_in_the_reports(fit):
    prose = " ".join(" ".join(c.source for c in saved(FIT).cells if c.cell_type == "markdown").split())
    answers = [device(report).peak <= device(report).limit for report in vars(fit[1]).values()]
    assert answers == list(FITS.values())
    assert [sentence for sentence in SAID_OF_FIT if sentence not in prose] == []
    assert [sentence for sentence, holds in SAID_OF_FIT.items() if not holds(fit[1])] == []


def traffic(report):
    return sum(move.wire_bytes for move in report.collectives)


def step_s(report):
    return report.timing.predicted_step_s


def row(report, change):
    """The report's row of that option, over its own: peak, FLOPs and bytes sent."""
    own, found = report.alternatives[0], {a.change: a for a in report.alternatives}[change]
    return SimpleNamespace(peak=found.peak / own.peak, flops=found.flops / own.flops, sent=found.sent / own.sent)


SAID_OF_MADE = {
    "It has 27 million parameters": lambda r: (
        round(sum(x.bytes for x in r.plain.leaves if x.role == "params") / 4e6) == 27
    ),
    "with `--microbatches 2` the step would fit": lambda r: r.plain.advice[0].fix == "--microbatches 2",
    "`params` and `optimizer` are next to nothing": lambda r: held(r.plain) < 0.01 * device(r.plain).peak,
    "are stacks of 8, one slice for each layer": lambda r: (
        sum(b.bytes for b in r.plain.memory.buffers if b.shape[0] == 8) > 0.8 * device(r.plain).peak
    ),
    # Microbatches
    "The temporaries are an eighth of what they were": lambda r: (
        7.5 < device(r.plain).temporaries / device(r.microbatches).temporaries < 8.5
    ),
    "The FLOPs are the same": lambda r: row(r.microbatches, "without --microbatches 8").flops == 1,
    "sends eight times as much": lambda r: 7.5 < traffic(r.microbatches) / traffic(r.plain) < 8.5,
    "sums the gradients once a step, and sends half": lambda r: 0.4 < row(r.microbatches, "--reduce once").sent < 0.55,
    "gathers the weights once as well, and sends a tenth": lambda r: (
        0.08 < row(r.microbatches, "--reduce once-gathered").sent < 0.12
    ),
    "Both hold a little more": lambda r: all(
        1 < row(r.microbatches, f"--reduce {how}").peak < 1.06 for how in ("once", "once-gathered")
    ),
    # Remat
    "**peak**: about a ninth": lambda r: 8.5 < device(r.plain).peak / device(r.remat_full).peak < 9.5,
    "Without the option it is 82% of them": lambda r: round(row(r.remat_full, "without --remat full").flops, 2) == 0.82,
    "**sent**: the same": lambda r: traffic(r.remat_full) == pytest.approx(traffic(r.plain), rel=1e-3),
    "The largest buffers of the first report are 2,048 wide": lambda r: r.plain.memory.buffers[0].shape[-1] == 2048,
    "saves nearly half of the memory": lambda r: 0.5 < device(r.remat_mlp).peak / device(r.plain).peak < 0.6,
    "the predicted step hardly grows": lambda r: 1 < step_s(r.remat_mlp) / step_s(r.plain) < 1.06,
    # Precision
    "**Memory**: less than half": lambda r: device(r.bf16).peak < 0.5 * device(r.plain).peak,
    "This is the only one of these options that is": lambda r: (
        step_s(r.bf16) < step_s(r.plain) < min(step_s(x) for x in (r.microbatches, r.remat_full, r.remat_mlp))
    ),
    # Together, and run
    "Without `--remat mlp` the step would need a fifth more memory and compute less": lambda r: (
        1.15 < row(r.together, "without --remat mlp").peak < 1.25 and row(r.together, "without --remat mlp").flops < 1
    ),
    "`--reduce once-gathered` would send a third, and need no more memory": lambda r: (
        0.3 < row(r.together, "--reduce once-gathered").sent < 0.37
        and row(r.together, "--reduce once-gathered").peak < 1.01
    ),
    "Together they need a twentieth of the memory": lambda r: 19 < device(r.plain).peak / device(r.together).peak < 22,
    "yes, to about a millionth": lambda r: r.checked.check.passed and r.checked.check.max_rel_diff < 5e-6,
    "`--check` knows how much the rounding of bfloat16 may change them": lambda r: (
        r.checked_bf16.check.passed and r.checked_bf16.check.limit > r.checked.check.limit
    ),
    "A mean is the mean over the 44 real texts": lambda r: r.padded.check.passed and r.padded.options["pad"],
}


def test_the_saved_reports_show_what_each_option_changes_and_the_same_numbers():
    cells = {cell.id: cell for cell in saved(MADE).cells}
    forms = {id: [o.data for o in cell.get("outputs", ()) if "data" in o] for id, cell in cells.items()}
    for name in ("plain", "microbatches", "remat", "mlp", "bf16", "together"):
        (form,) = forms[name]
        assert "<script" not in form["text/html"]
        assert ("Does not fit:" if name == "plain" else "Would fit:") in form["text/plain"]
        assert ("as it is" in form["text/plain"]) == (name != "plain")
        assert "not compiled" not in form["text/plain"]
    for name in ("checked", "checked-bf16", "padded"):
        assert "The same numbers as the plain step" in forms[name][0]["text/plain"]
    assert "44 examples" in cells["uneven"].outputs[0].text


@pytest.mark.full
def test_what_each_option_costs_and_what_the_prose_says_of_it_is_in_the_reports(made):
    prose = " ".join(" ".join(c.source for c in saved(MADE).cells if c.cell_type == "markdown").split())
    fits = [device(getattr(made[1], name)).peak <= device(made[1].plain).limit for name in OPTIONS]
    assert fits == [False, True, True, True, True, True]
    assert [sentence for sentence in SAID_OF_MADE if sentence not in prose] == []
    assert [sentence for sentence, holds in SAID_OF_MADE.items() if not holds(made[1])] == []
