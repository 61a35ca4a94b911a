"""The notebook on which strategy to take: what its prose says is in what it saved, and in what a kernel gives."""

import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from support.saved_notebooks import assert_as_it_ran

from jaxshard_magic.targets import tpu

PATH = Path(__file__).parents[2] / "notebooks/05_choose.ipynb"
SCRIPT = runpy.run_path(str(PATH.parent / "execute.py"))
SLICE = "## Part 5"
FIVE = {"dp", "fsdp", "tp", "fsdp+tp", "pp"}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def saved():
    return nbformat.read(PATH, 4)


def parts(notebook, beyond):
    """Parts 1 to 4, or those beyond, which need the TPU's compiler."""
    (at,) = (i for i, cell in enumerate(notebook.cells) if cell.source.startswith(SLICE))
    notebook.cells = notebook.cells[at:] if beyond else notebook.cells[:at]
    return notebook


@pytest.fixture(scope="module", params=["saved", pytest.param("run", marks=pytest.mark.full)])
def here(request, tmp_path_factory):
    notebook = parts(saved(), beyond=False)
    return SCRIPT["executed"](notebook, tmp_path_factory.mktemp("nb")) if request.param == "run" else notebook


@pytest.fixture(scope="module", params=["saved", pytest.param("run", marks=pytest.mark.ci)])
def on_slice(request, tmp_path_factory):
    notebook = saved()
    if request.param == "run":
        if not os.environ.get("JAXSHARD_NOTEBOOKS"):
            pytest.skip("minutes of compiles: set JAXSHARD_NOTEBOOKS=1 to run it")
        if (missing := tpu.missing()) is not None:
            pytest.skip(str(missing))
        notebook = SCRIPT["executed"](notebook, tmp_path_factory.mktemp("nb"))
    return parts(notebook, beyond=True)


def output(notebook, name):
    """What the cell of that name printed and showed, in one line."""
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    shown = [o.data["text/plain"] for o in cell.outputs if "text/plain" in o.get("data", {})]
    text = "\n".join([printed, *shown]).replace("\N{NARROW NO-BREAK SPACE}", " ")
    return re.sub(r"[ \N{NO-BREAK SPACE}]", " ", text)


def line(text):
    return " ".join(text.split())


def prose(notebook, name):
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return line(cell.source)


def size(text):
    """`5.86 MiB`, `120 us` in bytes or seconds."""
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


def answers(text):
    """The first table of a comparison: of each row whether it is on the front, fits, peak, step and numbers."""
    row = r"^([* ]) (\S.*?)  +(yes|no limit|no)  +([\d.]+ \w+)  +([\d.,]+ \w+)  +(yes|not checked)"
    return {
        name: (star == "*", fits, size(peak), size(step), same)
        for star, name, fits, peak, step, same in re.findall(row, text, re.M)
    }


def sent(text):
    """MiB that each row of a comparison's second table sends over each axis."""
    rows = re.findall(r"^[* ] (\S.*?)  +(?:\w+=\d+ ?)+  +((?:\w+ [\d.,]+ ?)+)", text, re.M)
    return {name: {axis: float(mib) for axis, mib in re.findall(r"(\w+) ([\d.]+)", over)} for name, over in rows}


def loss(text):
    return float(re.findall(r"^loss (\d\.\d+)$", text, re.M)[0])


def test_the_five_have_the_plain_steps_numbers(here):
    rows = answers(output(here, "five"))
    assert set(rows) == FIVE
    assert {same for *_, same in rows.values()} == {"yes"}
    assert {fits for _, fits, *_ in rows.values()} == {"yes"}


def test_what_a_step_took_on_the_cpu_is_compared_with_nothing(here):
    said = line(output(here, "five"))
    assert said.startswith("Fastest: dp, 154 us predicted at 21.6 MiB. Least memory: pp, 5.86 MiB")
    assert "What a step took on this CPU says nothing about an accelerator, and is not compared." in said


def test_the_first_of_one_chip_is_the_first_of_another_and_the_last_is_not(here):
    rows = [answers(output(here, name)) for name in ("five", "on-h100")]
    orders = [sorted(of, key=lambda name, of=of: of[name][3]) for of in rows]
    assert [(order[0], order[-1]) for order in orders] == [("dp", "pp"), ("dp", "tp")]
    assert "`dp` is the fastest of the five on both chips" in prose(here, "cpu-text")
    assert "`pp` sends least and is last on the TPU" in prose(here, "cpu-text")


def test_for_another_chip_all_fit_with_the_memory_and_the_bytes_from_before(here):
    one, other = (output(here, name) for name in ("five", "on-h100"))
    of_each = {name: row[2] for name, row in answers(one).items()}
    assert {name: row[2] for name, row in answers(other).items()} == of_each
    assert {fits for _, fits, *_ in answers(other).values()} == {"yes"}
    assert sent(other) == sent(one)
    total = {name: sum(over.values()) for name, over in sent(other).items()}
    assert set(total) == FIVE and min(total, key=lambda name: total[name]) == "pp"


def test_more_devices_along_model_send_more_and_remat_trades_memory_for_time(here):
    text = output(here, "meshes")
    rows, over = answers(text), sent(text)
    both = "fsdp+tp", "fsdp+tp remat full"
    for name in both:
        narrow, wide = f"{name} data=4 model=2", f"{name} data=2 model=4"
        assert over[narrow]["model"] < over[wide]["model"]
        assert rows[narrow][3] < rows[wide][3]
    pairs = [("fsdp", "fsdp remat full")] + [
        (f"{both[0]} {m}", f"{both[1]} {m}") for m in ("data=4 model=2", "data=2 model=4")
    ]
    for plain, remat in pairs:
        assert rows[remat][2] < rows[plain][2] and rows[remat][3] > rows[plain][3]
    assert len(rows) == 6 and "makes six candidates" in prose(here, "meshes-text")
    beaten = {
        name
        for name, (_, _, peak, step, _) in rows.items()
        if any(other[2] < peak and other[3] < step for other in rows.values())
    }
    assert {name for name, (star, *_) in rows.items() if not star} == beaten != set()
    assert "Each without one is slower and larger than another" in prose(here, "meshes-text")


def test_reports_are_put_side_by_side_by_names(here):
    rows = answers(output(here, "two"))
    assert [re.sub(r" #\d+", "", row) for row in rows] == ["dp", "fsdp", "fsdp remat full"]
    assert all(star for star, *_ in rows.values())


def test_the_search_agrees_with_the_usual_path_and_the_runner_up_is_slower(here):
    said = line(output(here, "auto"))
    assert "59% faster than the runner-up, dp+tp on data=4 model=2" in said
    assert "The usual path leads to dp, and so does the search." in said
    assert "21 candidates considered, 2 compiled. 19 can't be faster" in said
    assert "the search leads to `dp`, too" in prose(here, "auto-text")
    (data, model) = re.findall(r"dp\+tp data=4 model=2 data ([\d,]+) model ([\d,]+)", said)[0]
    (alone,) = re.findall(r" dp data=8 data ([\d,]+)", said)
    counts = [int(figure.replace(",", "")) for figure in (data, model, alone)]
    assert counts[0] + counts[1] < counts[2]
    assert "the runner-up sends fewer bytes than `dp`" in prose(here, "auto-text")


def test_those_ruled_out_take_longer_at_least_than_the_choice(here):
    chosen, *others = output(here, "bound").strip().splitlines()
    of = [int(re.findall(r"(\d+) us$", row)[0]) for row in (chosen, *others)]
    assert len(others) == 5 and of[1:] == sorted(of[1:]) and of[0] < of[1]


def test_the_cell_trains_with_the_choice_and_later_cells_go_on(here):
    assert loss(output(here, "auto")) == pytest.approx(loss(output(here, "plain")), abs=5e-4)
    assert "ShardedStep train_step: dp on data=8" in output(here, "goes-on")
    assert loss(output(here, "goes-on")) < loss(output(here, "auto"))


def test_a_misspelt_strategy_is_an_error_that_knows_what_was_meant(here):
    said = output(here, "wrong")
    assert "'fdsp' is no strategy" in said and "Did you mean 'fsdp'?" in said


def test_a_candidate_that_cannot_run_is_a_row_with_its_reason(here):
    said = line(output(here, "refused"))
    assert "One of two could not run" in said
    assert "32 examples do not divide into 5 microbatches" in said
    assert "fsdp microbatches 4 yes" in said


def test_the_plan_of_the_large_model_is_what_the_prose_says(on_slice):
    said, told = line(output(on_slice, "plan")), prose(on_slice, "plan-text")
    assert output(on_slice, "big").startswith("1.08 billion parameters")
    assert "arrays 24.0 GiB" in said and "of 15.75 GiB" in said and "arrays of 24 GiB" in told
    gathers, products = re.findall(r"([\d.]+) ms to send under fsdp, beside ([\d.]+) ms of products", said)[0]
    assert float(gathers) < float(products)
    assert "The usual path leads to fsdp, and so does the search." in said
    assert re.search(r" dp --precision bf16 data=16 \d+ ms 28\.\d GiB", said) and "needs about 28 GiB" in told
    found = r"fsdp on data=16.*: about (\d+) ms .* the runner-up, dp\+fsdp on .*, takes about (\d+) ms"
    best, second = map(int, re.findall(found, said)[0])
    assert 1.25 < second / best < 1.33 and "takes more than a quarter longer" in told
    bounds = [size(figure) for figure in re.findall(r"data=16 (\d+ ms) 11\.8 GiB", said)]
    assert bounds and max(bounds) < best / 1000


def test_the_choice_for_the_slice_fits_and_the_others_are_ruled_out(on_slice):
    said = line(output(on_slice, "budget"))
    least = int(re.findall(r"about (\d+) ms", line(output(on_slice, "plan")))[0])
    predicted, needs = re.findall(r"(\d+) ms a step predicted for TPU v5e, ([\d.]+) of 15.75 GiB a device", said)[0]
    assert int(predicted) > least == 230 and float(needs) < 15.75
    assert f"{least} ms" in prose(on_slice, "budget-text")
    assert "6 candidates considered, 2 compiled. 2 can't be faster" in said
    assert "2 need more memory than there is: strategy mesh at least needs about dp" in said
    assert "its arrays alone take more than a device has" in said


def test_from_python_it_is_the_same_choice(on_slice):
    said, found = output(on_slice, "budget"), output(on_slice, "choose")
    lines = re.findall(r"^    %%shard (.*)$", said, re.M)
    assert re.findall(r"^(?:chosen|runner-up): +(.*)$", found, re.M) == lines[:2]
    assert found.strip().endswith("True")
    assert output(on_slice, "compare").startswith('fastest: dp --mesh "data=8"')


def test_it_is_saved_as_it_ran_and_holds_nothing_of_the_machine():
    assert_as_it_ran(PATH, failed=["wrong"])


def test_what_is_shown_is_text_and_html_without_script():
    shown = [o.data for cell in saved().cells for o in cell.get("outputs", ()) if "text/html" in o.get("data", {})]
    # two meshes, five comparisons, three choices
    assert len(shown) == 10
    assert all("text/plain" in forms and "<script" not in forms["text/html"] for forms in shown)
