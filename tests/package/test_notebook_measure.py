"""The notebook on where the time goes: each fault that it plants is found in its cell's report, at its place."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from support.saved_notebooks import assert_as_it_ran

PATH = Path(__file__).parents[2] / "notebooks/08_measure.ipynb"
PLANTED = {
    "late": "slow-device",
    "asked": "waits-for-python",
    "again": "recompiled",
    "starved": "input-bound",
    "astray": "loss-astray",
}
BY_CLOCK = {"slow-device", "input-bound"}  # other work on the machine may bring them anywhere


@pytest.fixture(scope="module", params=["saved", pytest.param("run", marks=pytest.mark.ci)])
def notebook(request, tmp_path_factory):
    saved = nbformat.read(PATH, 4)
    if request.param == "saved":
        return saved
    return runpy.run_path(str(PATH.parent / "execute.py"))["executed"](saved, tmp_path_factory.mktemp("nb"))


def cell(notebook, name):
    (found,) = (cell for cell in notebook.cells if cell.id == name)
    return found


def said(notebook, name):
    """What the cell of that name printed and showed, in one line."""
    outputs = cell(notebook, name).outputs
    text = "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)
    return " ".join(text.split())


def at(notebook, name, piece):
    """The line of the cell that has `piece`, as a report names it."""
    (line,) = (n for n, text in enumerate(cell(notebook, name).source.splitlines(), 1) if piece in text)
    return f"cell [{cell(notebook, name).execution_count}], line {line}"


def devices(notebook):
    """Of each device the milliseconds that it computes and waits."""
    rows = re.findall(r"(\d) ([\d.]+) ms ([\d.]+) ms", said(notebook, "rows"))
    return {int(device): (float(computes), float(waits)) for device, computes, waits in rows}


def told(notebook):
    """The codes of the planted faults that each report has hints of."""
    rows = [row.split()[1:] for row in cell(notebook, "codes").outputs[0].text.strip().splitlines()]
    return {name: {*row} & {*PLANTED.values()} for name, row in zip(PLANTED, rows, strict=True)}


def test_each_report_has_the_hint_for_what_was_planted(notebook):
    for name, codes in told(notebook).items():
        assert PLANTED[name] in codes
        assert codes - BY_CLOCK <= {PLANTED[name]}


def test_as_it_is_saved_no_report_has_a_hint_of_what_another_one_had_planted():
    assert told(nbformat.read(PATH, 4)) == {name: {code} for name, code in PLANTED.items()}


def test_the_device_with_more_to_do_is_named_and_the_others_wait_for_it(notebook):
    assert 'rounds = jnp.where(jax.lax.axis_index("data") == 2, 40, 1)' in cell(notebook, "late").source
    assert re.search(r"i Device 2 computes [\d.]+ ms longer in a step than the median one", said(notebook, "late"))
    rows = devices(notebook)
    late = rows.pop(2)
    assert len(rows) == 3
    for computes, waits in rows.values():
        assert computes < late[0] / 2 and waits > 10 * late[1]
        assert computes + waits == pytest.approx(sum(late), rel=0.25)  # all are done when the last one is


def test_the_sleep_in_python_is_at_its_line_for_as_long_as_it_sleeps(notebook):
    text = said(notebook, "asked")
    line = at(notebook, "asks", "jax.pure_callback")
    found = re.search(
        r"A device waits up to ([\d.]+) ms of a step's ([\d.]+) ms for Python on the host, most at "
        r"(cell \[\d+\], line \d+)",
        text,
    )
    assert found is not None and found[3] == line
    assert 20 <= float(found[1]) < 28  # one of four devices sleeps for 20 ms
    assert float(found[2]) > 20
    assert "No line is known" not in text and "not traced to a line" not in text  # of what hands the answer around
    assert "over all 16 calls" in text  # the report is of the loop still


def test_the_call_that_was_compiled_anew_is_named_with_its_line_and_its_shapes(notebook):
    text = said(notebook, "again")
    assert f"Call {1 + 4000 // 512} compiled the step anew" in text
    assert at(notebook, "again", "train_step(") in text
    assert f"x was float32[512,64], now float32[{4000 % 512},64]" in text


def test_the_loop_that_its_step_waits_for_is_found_at_the_line_that_sleeps(notebook):
    text = said(notebook, "starved")
    (share,) = re.findall(r"The step waits for its loop (\d+)% of the time", text)
    (apart,) = re.findall(r"([\d.]+) ms pass from call to call", text)
    assert int(share) > 50 and float(apart) >= 30  # which is slept between two calls
    assert f"It was at {at(notebook, 'starved', 'time.sleep(0.03)')} at " in text


def test_the_first_step_whose_loss_is_no_number_is_named(notebook):
    (step, before) = re.findall(
        r"The loss is not finite from step (\d+) on; at step (\d+) it was finite", said(notebook, "astray")
    )[0]
    assert int(step) == int(before) + 1
    assert f"not finite from step {step} on" in said(notebook, "rows")


def test_a_loop_with_nothing_wrong_trains_and_has_its_curves_and_its_lines(notebook):
    text = said(notebook, "healthy")
    first, last = (float(re.findall(rf"{word} ([\d.]+)", text)[0]) for word in ("steps, from", "Training: loss"))
    assert last < first / 2
    assert "5 recorded steps" in text
    assert not [code for code in ("not finite", "waits for its loop", "compiled the step anew") if code in text]


def test_it_is_saved_as_it_ran_and_holds_nothing_of_the_machine():
    assert_as_it_ran(PATH)
