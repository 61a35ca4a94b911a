"""The notebook on pipelines: what its prose says of the pictures is in what it saved."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = nbformat.read(Path(__file__).parents[2] / "notebooks/04_pipelines.ipynb", 4)
PROSE = " ".join(" ".join(c.source for c in NOTEBOOK.cells if c.cell_type == "markdown").split())
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def texts(cell):
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    shown = [o.data["text/plain"] for o in cell.outputs if "text/plain" in o.get("data", {})]
    return "\n".join([printed, *shown])


def output(begins):
    """What the one cell whose code begins so printed and showed."""
    (cell,) = (c for c in NOTEBOOK.cells if c.cell_type == "code" and c.source.startswith(begins))
    return texts(cell)


def table():
    """Of each schedule: ideal, predicted and measured bubble, microbatches, MiB held, MiB sent."""
    rows = output("MIB = 2**20").splitlines()
    return {
        row.split()[0]: [float(x.rstrip("%")) for x in row.split()[1:]] for row in rows if row.startswith(SCHEDULES)
    }


def test_the_bubble_shrinks_from_gpipe_to_zero_bubble():
    ideal = [table()[name][0] for name in SCHEDULES]
    predicted = [table()[name][1] for name in SCHEDULES]
    assert ideal[:3] == [27.3, 27.3, 15.8]
    assert ideal[3] < 0.5 * ideal[0]
    assert max(predicted[2:]) < min(predicted[:2])
    assert "Ideal is 27.3%" in PROSE
    assert "**Ideal**: 15.8%, from 27.3%" in PROSE


def test_what_is_held_and_sent_is_what_the_prose_says():
    held, sent = ([table()[name][k] for name in SCHEDULES] for k in (3, 5))
    assert held == [8, 4, 5.5, 4]
    assert 2 < sent[2] / sent[0] < 2.5
    assert sent[0] == sent[1] == sent[3]
    mib = {name: table()[name][4] for name in SCHEDULES}
    assert mib["1f1b"] < mib["zb-h1"] < mib["gpipe"]
    assert "the first device holds 11 halves of a microbatch's activations, where it held 4 wholes" in PROSE


def test_every_pipeline_has_the_plain_steps_loss():
    losses = [
        float(x)
        for c in NOTEBOOK.cells
        if c.cell_type == "code" and "for x, y in batches(8)" in c.source
        for x in re.findall(r"^loss (\d\.\d+)", texts(c), re.M)
    ]
    assert len(losses) == 7
    assert losses == pytest.approx([losses[0]] * 7, abs=5e-4)
    assert re.search(r"numbers\s+yes", output("%%shard pp --schedule gpipe --microbatches 8 --check"))


def test_stages_that_wait_are_measured_close_to_what_is_predicted():
    for name in ("waiting_gpipe", "waiting_zb"):
        said = re.findall(r"bubble ([\d.]+)% measured, ([\d.]+)% predicted, ([\d.]+)% ideal", output(name))
        ((measured, predicted, ideal),) = (map(float, figures) for figures in said)
        assert ideal <= predicted <= measured + 1
        assert measured - ideal < 8


def test_the_measured_bubble_shrinks_where_stages_share_no_cores():
    rows = [line.split() for line in output('print("bubble:         ideal  predicted').splitlines()[1:]]
    assert tuple(name for name, *_ in rows) == SCHEDULES
    ideal, measured = ([float(row[k].rstrip("%")) for row in rows] for k in (1, 3))
    assert all(0 <= m - i < 5 for i, m in zip(ideal, measured, strict=True))
    assert measured[3] < measured[2] < min(measured[:2])
    step_ms = [float(row[4]) for row in rows]
    assert step_ms[3] < step_ms[2] < min(step_ms[:2])


def test_more_microbatches_shrink_the_bubble_and_what_is_held():
    rows = [re.findall(r"[\d.]+(?=%|$)", row) for row in output("for other in sorted").splitlines()]
    ideal, held = ([float(row[k]) for row in rows] for k in (1, 2))
    assert ideal == sorted(ideal, reverse=True)
    assert held == [8, 4, 2, 1]
    (ran,) = re.findall(r"predicted, ([\d.]+)% ideal", output("%%shard pp --schedule zb-h1 --microbatches 32"))
    assert 0.2 < float(ran) / table()["zb-h1"][0] < 0.4


def test_fsdp_inside_the_stages_halves_their_state():
    found = dict(re.findall(r"^(pp\S*) +([\d.]+) MiB on the fullest", output("def state(report)"), re.M))
    assert 0.45 < float(found["pp+fsdp"]) / float(found["pp"]) < 0.6


def test_the_slice_is_compiled_and_predicted():
    said = output('%%shard pp --mesh "v5e:2x4')
    assert "Would fit:" in said
    assert "for TPU v5e, not run" in said
    assert "measured" not in said.partition("Pipeline:")[2].partition("\n\n")[0]
