"""What a person meets before any code runs: metadata, the commands of the README, the map of the files."""

import re
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import conftest
import jax
import jax.numpy as jnp
import pytest

import jaxshard_magic
from jaxshard_magic.config.strategies import STRATEGIES, Strategy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxshard_magic"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def commands(page: str) -> list[str]:
    """The lines of the page's shell blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_public_name_is_there():
    assert set(jaxshard_magic.__all__) <= set(dir(jaxshard_magic))
    for name in jaxshard_magic.__all__:
        assert getattr(jaxshard_magic, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        _ = jaxshard_magic.shards


def test_doctor_stays_the_function_when_the_room_is_imported():
    import_module("jaxshard_magic.doctor")
    assert callable(jaxshard_magic.doctor)


def test_the_console_script_is_a_function():
    module, _, name = PROJECT["scripts"]["jaxshard"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_the_licence_is_apache_2_and_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_extras_are_there_and_those_of_compilers_leave_the_pairing_to_jax():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {
        "checkpoints",
        "data",
        "demo",
        "png",
        "hosts",
        "lab",
        "tpu",
        "cuda-aot",
        "test",
        "docs",
        "dev",
    }
    assert extras["tpu"][0].startswith("jax[tpu]") and extras["cuda-aot"][0].startswith("jax[cuda12-local]")


def test_what_the_demo_needs_is_tested_too():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["demo"]) <= set(extras["test"])


@pytest.mark.parametrize("page", PAGES)
def test_an_extra_that_a_page_installs_exists(page):
    named = re.findall(r"(?<![\w)])(?:\.|jaxshard_magic)\[([\w,-]+)\]", (ROOT / page).read_text())
    assert {extra for group in named for extra in group.split(",")} <= set(PROJECT["optional-dependencies"])


def test_the_readme_has_one_command_for_the_job_and_one_for_the_tests():
    first, second = (line for line in commands("README.md") if line.startswith("python3 -m venv"))
    assert "'.[demo]'" in first
    assert first.endswith("jaxshard demo")
    assert "'.[test,tpu]'" in second
    assert second.endswith("-m pytest -n 2")


def test_the_strategy_that_contributing_adds_places_arrays_as_it_says(monkeypatch):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = textwrap.dedent(re.findall(r"^   ```python\n(.*?)^   ```", text, re.MULTILINE | re.DOTALL)[0])
    rows = ModuleType("rows")
    rows.__package__ = "jaxshard_magic.strategies"
    exec(code, rows.__dict__)
    monkeypatch.setitem(sys.modules, "jaxshard_magic.strategies.rows", rows)
    row = Strategy("rows", "parameters divided by rows", ("fsdp", "data"), divides="rows:by_rows")
    monkeypatch.setitem(STRATEGIES, "rows", row)

    def step(weights, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w["up"] + w["bias"]) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - g, weights, grads)

    weights, x = {"up": jnp.ones((64, 12)), "bias": jnp.ones(12)}, jnp.ones((16, 64))
    sharded = jaxshard_magic.shard(step, "rows", mesh="data=8")
    assert jnp.allclose(sharded(weights, x)["up"], step(weights, x)["up"])
    leaves = {leaf.path: leaf for leaf in sharded.report().leaves}
    assert leaves["weights.up"].why == "rows: dim 0 over data"
    assert leaves["weights.up"].spec[0] == "data"
    assert leaves["weights.bias"].why == "rows: dim 0 does not divide by data=8"
    assert leaves["weights.bias"].lost == 42  # of 48 bytes, all but an eighth


def test_ci_runs_the_test_command_of_the_readme():
    found = [line for line in (ROOT / "README.md").read_text().splitlines() if "-m pytest" in line]
    assert len(found) == 1, "grep -m 1 in .ci/run takes the first line with '-m pytest'"
    assert "grep -m 1 -- '-m pytest' README.md" in (ROOT / ".ci/run").read_text()


def test_ci_is_a_script_that_bash_can_read():
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    subprocess.run(["bash", "-n", ROOT / ".ci/run"], check=True)


def test_the_map_of_the_files_names_what_is_there_and_all_of_it():
    there = {p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.*")))} - {
        "__pycache__"
    }
    rows = re.findall(r"^\| `([\w.]+)/?`", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    assert set(rows) == there


def test_every_benchmark_is_described():
    text = (ROOT / "benchmarks/README.md").read_text()
    for path in (ROOT / "benchmarks").glob("bench_*.py"):
        assert path.name in text


@pytest.mark.parametrize("pattern", [*conftest.HEAVIEST, *conftest.NO_JAX])
def test_a_file_of_tests_that_is_ordered_or_marked_exists(pattern):
    assert any((ROOT / "tests").glob(pattern))
