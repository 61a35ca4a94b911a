"""`jaxshard demo` as a person runs it: a fresh process, two strategies, two reports, a page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard_magic import console, demo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[str, str]:
    """What the demo printed, and the page that it wrote."""
    page = tmp_path_factory.mktemp("demo") / "report.html"
    command = [sys.executable, "-m", "jaxshard_magic.console", "demo", "--steps", "40", "--html", str(page)]
    env = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rematerialization" not in done.stderr  # XLA's warning where it replicates an array to move it
    return done.stdout, page.read_text()


@pytest.mark.ci
def test_both_strategies_train_to_the_same_loss_and_most_test_digits_right(ran):
    found = re.findall(r"^(\S+) +loss (\S+) -> (\S+)   (\S+)% of", ran[0], re.MULTILINE)
    assert [strategy for strategy, *_ in found] == ["dp", "fsdp"]
    (_, first, last, right), (_, *again) = found
    assert float(first) > 2 > 0.5 > float(last)
    assert float(right) > 90
    assert float(again[0]) == pytest.approx(float(first), abs=2e-4)
    assert float(again[1]) == pytest.approx(float(last), abs=2e-2)


@pytest.mark.ci
def test_the_reports_name_their_mesh_and_say_that_the_numbers_are_the_same(ran):
    text = ran[0]
    assert re.search(r"^dp .* data=8 +8 simulated CPU devices", text, re.MULTILINE)
    assert re.search(r"^fsdp .* data=8 +8 simulated CPU devices", text, re.MULTILINE)
    assert len(re.findall(r"^  numbers +(?:same|yes) ", text, re.MULTILINE)) == 2


@pytest.mark.ci
def test_what_moves_has_the_lines_of_the_step(ran):
    source = Path(demo.__file__).read_text().splitlines()
    lines = re.findall(r"^ +demo\.py:(\d+)  (return self\.head\(.{8})", ran[0], re.MULTILINE)
    assert len(lines) >= 2  # of both reports
    assert all(source[int(n) - 1].strip().startswith(text) for n, text in lines)
    assert "demo.py, line " in " ".join(ran[0].split())


@pytest.mark.ci
def test_the_page_is_where_it_says_and_has_no_script(ran):
    text, page = ran
    assert re.search(r"^Report: /.*report\.html$", text, re.MULTILINE)
    assert "fsdp" in page
    assert "<script" not in page


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert console.main(["demo", "--html", str(tmp_path / "page.html")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install scikit-learn" in error


def test_its_help_needs_no_library():
    code = (
        "import sys\nfrom jaxshard_magic.console import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print(sorted({'jax', 'numpy', 'flax', 'IPython'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.startswith("usage: jaxshard"), done.stderr
    assert done.stdout.rstrip().endswith("[]")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--steps", "0"], "'0' is not a number of steps"),
        (["demo", "--steps", "many"], "'many' is not a number of steps"),
        (["demo", "--html", "/no/such/folder/page.html"], "there is no folder /no/such/folder"),
        (["dem"], "invalid choice: 'dem'"),
    ],
)
def test_a_bad_argument_is_refused_before_any_training(arguments, says, capsys):
    with pytest.raises(SystemExit) as stop:
        console.main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.ci
def test_every_fifth_digit_is_kept_for_the_test_and_none_is_in_both():
    digits = demo.load_digits()
    assert digits.images.shape == (1437, 8, 8, 1)
    assert digits.test_images.shape == (360, 8, 8, 1)
    assert digits.images.min() == 0
    assert digits.images.max() == 1
    whole = {image.tobytes() for image in digits.images}
    assert not whole & {image.tobytes() for image in digits.test_images}
