"""The notebook on trying layouts: what its prose says is in what it saved, and in what a kernel gives."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from support.saved_notebooks import assert_as_it_ran

PATH = Path(__file__).parents[2] / "notebooks/06_explore.ipynb"
SCRIPT = runpy.run_path(str(PATH.parent / "execute.py"))
MIB = 2**20
WTE = 50257 * 768 * 4 / MIB  # MiB
EMBED = 1001 * 256 * 4 / MIB
LAYER = 256 * 1024 * 4 / MIB


def saved():
    return nbformat.read(PATH, 4)


@pytest.fixture(scope="module", params=["saved", pytest.param("run", marks=pytest.mark.full)])
def here(request, tmp_path_factory):
    return SCRIPT["executed"](saved(), tmp_path_factory.mktemp("nb")) if request.param == "run" else saved()


def output(notebook, name):
    """What the cell of that name printed and showed."""
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    shown = [o.data["text/plain"] for o in cell.outputs if "text/plain" in o.get("data", {})]
    return "\n".join([printed, *shown]).replace("\N{NARROW NO-BREAK SPACE}", " ")


def prose(notebook, name):
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return " ".join(cell.source.split())


def test_bytes_times_devices_are_the_whole_times_its_copies(here):
    rows = re.findall(r"([\d.]+) MiB on each device, copies: (\d+)", output(here, "ways"))
    assert [int(copies) for _, copies in rows] == [8, 4, 2, 1]
    for mib, copies in rows:
        assert float(mib) * 8 == pytest.approx(WTE * int(copies), abs=0.5)
    assert "**147 MiB** is the whole array" in prose(here, "cut-text")
    assert round(WTE) == 147


def test_what_can_not_be_says_what_would_be_possible(here):
    first, second, third = output(here, "odd").strip().splitlines()
    assert "Make it 50256 or 50260" in first and "50260" in prose(here, "array-text")
    assert "Did you mean 'model'?" in second
    assert "uses axis 'data' twice" in third


def test_the_meshes_cut_as_the_prose_says(here):
    rows = re.findall(r"^(\S.*?) +(\d+) devices +([\d.]+) MiB on each +(P.*)$", output(here, "meshes"), re.M)
    assert {mesh: int(n) for mesh, n, _, _ in rows} == {
        "data=8": 8,
        "data=2 model=4": 8,
        "data=5 model=2": 10,
        "data=64 model=4": 256,
    }
    parts = {mesh: WTE / float(mib) for mesh, _, mib, _ in rows}
    assert list(parts.values()) == pytest.approx([8, 8, 2, 256], rel=0.02)
    assert [spec for *_, spec in rows][2] == "P(None, 'model')"


def test_the_embedding_is_cut_over_data_alone(here):
    said = output(here, "explore")
    assert "state.params.embed    f32[1001,256@data]" in said
    # a quarter of three embeddings, an eighth of three times two layers
    assert f"All 12 arrays: {3 * EMBED / 4 + 6 * LAYER / 8:.2f} MiB on each device." in said


def test_one_edit_sets_three_arrays_and_moves_the_layers(here):
    said = output(here, "rule")
    assert "follows: state.opt.0.mu.embed state.opt.0.nu.embed\n" in said
    (moved,) = re.findall(r"^moved: +(.*)$", said, re.M)
    assert {path.rpartition(".")[2] for path in moved.split()} == {"up", "down"} and len(moved.split()) == 6
    before, now = map(float, re.findall(r"([\d.]+) MiB on each device before, ([\d.]+) now", said)[0])
    assert before - now == pytest.approx(3 * EMBED * (1 / 4 - 1 / 8), abs=0.01)
    assert said.rstrip().endswith("""--rule "state.params.embed=P(None, ('data', 'model'))\"""")


def test_strategies_are_planned_and_one_without_its_axis_says_so(here):
    said = output(here, "strategies")
    rows = re.findall(r"^(\w+) +(\w+=8) +([\d.]+) MiB", said, re.M)
    whole = 3 * EMBED / 8 + 6 * LAYER  # what was set by hand stays cut eightfold
    assert {(s, m): float(n) for s, m, n in rows} == {
        ("dp", "data=8"): pytest.approx(whole, abs=0.01),
        ("tp", "data=8"): pytest.approx(whole, abs=0.01),
        ("tp", "model=8"): pytest.approx(3 * EMBED / 8 + 6 * LAYER / 8, abs=0.01),
        ("fsdp", "data=8"): pytest.approx(3 * EMBED / 8 + 6 * LAYER / 8, abs=0.01),
        ("spmd", "data=8"): pytest.approx(whole, abs=0.01),
    }
    assert said.count("tp needs a mesh axis for it (model)") == 1


def test_compiling_runs_nothing_and_has_both_figures(here):
    said = output(here, "compile")
    for name in ("at the peak", "sent"):
        predicted, compiled = map(
            float, re.findall(rf"{name}: +([\d.]+) MiB predicted, +([\d.]+) MiB compiled", said)[0]
        )
        assert 0 < predicted < compiled
    assert said.rstrip().endswith("calls: 0")


def test_the_line_gives_the_same_loss_and_the_bytes_that_were_told(here):
    losses = [re.findall(r"^loss (\d\.\d+)$", output(here, name), re.M)[0] for name in ("step", "run")]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=2e-4)
    assert output(here, "same").strip() == "True 12 arrays"
    line = output(here, "rule").strip().splitlines()[-1].replace(" -o before", "")
    (cell,) = (cell for cell in here.cells if cell.id == "run")
    assert cell.source.partition("\n")[0].replace(" -o after", "") == line


def test_it_is_saved_as_it_ran_and_holds_nothing_of_the_machine():
    assert_as_it_ran(PATH)


def test_what_is_shown_is_text_and_html_without_script():
    shown = [o.data for cell in saved().cells for o in cell.get("outputs", ()) if "text/html" in o.get("data", {})]
    assert len(shown) == 6  # a mesh, two explorers, two reports, a program
    assert all("text/plain" in forms and "<script" not in forms["text/html"] for forms in shown)


def test_the_code_to_take_home_gives_the_same_loss_in_a_process_of_its_own(here):
    program = output(here, "code")
    for said in (
        "ARGUMENTS = {",
        "RESULTS = {",
        "hold(",
        '"state.params.embed": P(None, ("data", "model")),',
    ):
        assert said in program
    assert "In a step every device takes part in these collectives" in program
    assert output(here, "alone").split() == output(here, "run").split()[:2]
