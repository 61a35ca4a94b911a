"""Settings that must stand before jax starts, what keeps the suite short, and a notebook to run cells in."""

import atexit
import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from support.settings import SETTINGS

os.environ.update(SETTINGS)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a process that a shell began in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import numpy as np
import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from support.browsing import Stage, chromium, reason_for_none, required, stage
from support.cells import GIVEN, STEP
from traitlets.config import Config

from jaxshard_magic import simulate

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# How long an example takes says more of the machine than of the package.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

TESTS = Path(__file__).parent
CPU_DEVICES = "jax_num_cpu_devices"
MAPS = Path("/proc/self/maps")
MAPPINGS = 5_000  # of memory: about a thousand programs that JAX keeps, and a gigabyte
_tests = itertools.count(1)
_browsers: list[Any] = []  # the one that is open
_opened = ExitStack()

# Tens of seconds each: with two processes nothing long may begin last. First what records: once a process has loaded
# libtpu, for a slice, a recording takes 1 to 2 seconds to end.
HEAVIEST = (
    "step/test_profile_pipelines.py",
    "step/test_profile.py",
    "live/test_watch.py",
    "notebook/test_magic_profile.py",
    "step/test_profile_zoo.py",
    "package/test_zoo.py",
    "package/test_zoo_pipelines.py",
    "strategies/test_strategies.py",
    "pipeline/test_pipeline_step.py",
    "pipeline/test_numbers.py",
    "strategies/test_communication.py",
    "strategies/test_gathers.py",
    "strategies/test_traffic.py",
    "step/test_step_nnx.py",
    "strategies/test_heads.py",
    "strategies/test_sp.py",
    "strategies/test_ep.py",
    "strategies/test_sp_positions.py",
    "strategies/test_ring.py",
    "strategies/test_dealing.py",
    "gradients/test_attention_fused.py",
    "gradients/test_ten_steps.py",
    "strategies/test_ep_sorted.py",
    "strategies/test_ep_in_turn.py",
    "gradients/test_accumulate.py",
    "pipeline/test_marker.py",
    "pipeline/test_pipeline_programs.py",
    "gradients/test_padding_microbatches.py",
    "program/test_pmap_options.py",
    "pipeline/test_losses.py",
    "pipeline/test_execution.py",
    "checkpoints/test_resume_killed.py",
    "checkpoints/test_resume_states.py",
    "checkpoints/test_resume.py",
    "program/test_rows.py",
    "strategies/test_convolutions.py",
    "checkpoints/test_checkpoints.py",
    "checkpoints/test_resume_feeds.py",
    "checkpoints/test_reading.py",
    "notebook/test_magic_code.py",
    "notebook/test_found_steps.py",
    "top_level/test_simulate.py",
    "top_level/test_simulate_found.py",
    "notebook/test_hints.py",
    "targets/test_targets.py",
    "targets/test_cache.py",
    "widgets/test_compare.py",
    "widgets/test_pipeline.py",
    "widgets/test_widgets.py",
    "widgets/test_selection.py",
)
# Views, schedules, parsers and what is about the files themselves: no jax takes part, or none that could differ.
NO_JAX = (
    "faults/test_faults.py",
    "history/*.py",
    "live/test_metrics.py",
    "notebook/test_lab.py",
    "notebook/test_lab_early.py",
    "notebook/test_lab_explore.py",
    "notebook/test_room.py",
    "package/test_book_built.py",
    "package/test_imports.py",
    "package/test_installed.py",
    "package/test_kernelspec.py",
    "report/test_sent.py",
    "schedule/*.py",
    "top_level/test_format.py",
    "top_level/test_hardware.py",
    "views/test_choice_views.py",
    "views/test_comparison_chart.py",
    "views/test_comparison_views.py",
    "views/test_comparison_widget.py",
    "views/test_figures.py",
    "views/test_history_views.py",
    "views/test_html.py",
    "views/test_hues.py",
    "views/test_leaves.py",
    "views/test_markdown.py",
    "views/test_measured_views.py",
    "views/test_one_number.py",
    "views/test_payload*.py",
    "views/test_text.py",
    "views/test_timeline.py",
    "views/test_training_views.py",
    "views/test_view.py",
    "views/test_views_memory.py",
    "views/test_views_mesh.py",
    "widgets/*.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "K/N: of the tests marked `full` or `ci` only the Kth of N shares, each the same tests at any time"
    parser.addoption("--share", default="1/1", help=how)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """The longest files first, the marker `no_jax`, the share asked for of dear tests, one skip where no browser is."""
    share, shares = map(int, config.getoption("--share").split("/"))
    if shares > 1:
        dear = [item for item in items if item.get_closest_marker("full") or item.get_closest_marker("ci")]
        left = {item for item in dear if crc32(item.nodeid.encode()) % shares != share - 1}
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]
    no_jax = {p for p in {item.path for item in items} if any(map(p.match, NO_JAX))}
    for item in items:
        if item.path in no_jax:
            item.add_marker("no_jax")
    rank = {name: i for i, name in enumerate(HEAVIEST)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(TESTS).as_posix(), len(rank)))
    yield  # pytest's own leaves out what `-m` and `-k` do
    _skip_once(config, items)


def _skip_once(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a browser its tests are left out; the first of them stays, and is skipped with the reason for all."""
    shown = [item for item in items if "browser" in _fixtures(item)]
    reason = None if not shown or required() else reason_for_none()
    if reason:
        shown[0].add_marker(pytest.mark.skip(f"{reason} (so {len(shown)} tests are left out)"))
        left = set(shown[1:])
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what was imported, and come less often: they took a tenth of the time."""
    _set_aside()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_logfinish() -> None:
    """What tests traced and compiled goes once it is much. JAX keeps it: each program has mappings of memory, of which
    Linux lets a process have 65,530, and each object makes the collections of garbage longer."""
    if next(_tests) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAPPINGS:
        gc.unfreeze()
        jax.clear_caches()


@dataclass(frozen=True)
class Notebook:
    """A real shell with the extension loaded; `run` raises what the cell raised, `fails` returns it."""

    shell: InteractiveShell

    def cell(self, code: str) -> ExecutionResult:
        return self.shell.run_cell(code, store_history=True)

    def run(self, code: str) -> Any:
        result = self.cell(code)
        result.raise_error()
        return result.result

    def fails(self, code: str) -> BaseException:
        result = self.cell(code)
        error = result.error_before_exec or result.error_in_exec
        assert error is not None, f"this cell should have failed:\n{code}"
        return error

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


def restore_devices(count: int) -> None:
    """Go back to `count` simulated devices: a mesh such as `cpu:16` took others, which stay for the whole process."""
    if simulate.config_value(CPU_DEVICES) != count:
        simulate.start(count)


@contextmanager
def shell() -> Iterator[InteractiveShell]:
    """A fresh IPython shell, nothing loaded, no history file. After it nothing holds its notebook, and there are as
    many devices as before."""
    devices = simulate.config_value(CPU_DEVICES)
    InteractiveShell.clear_instance()
    main = sys.modules["__main__"]
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    opened = InteractiveShell.instance(config=config)
    try:
        yield opened
    finally:
        atexit.unregister(opened.atexit_operations)  # else it lives as long as the process
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main
        restore_devices(devices)


@pytest.fixture
def bare_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A fresh IPython shell, nothing loaded, in its own home folder."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with shell() as opened:
        yield opened


@pytest.fixture
def notebook(bare_shell: InteractiveShell) -> Notebook:
    """A notebook with the extension loaded and nothing else."""
    bare_shell.run_line_magic("load_ext", "jaxshard_magic")
    return Notebook(bare_shell)


@pytest.fixture
def as_asked(notebook: Notebook) -> None:
    """Steps are compiled as their lines say alone, and not also without each option, for their reports."""
    notebook.run("%config ShardSession.options_limit = 0")


@pytest.fixture
def given(notebook: Notebook) -> Notebook:
    """A notebook with a state, a batch, a loss and a mesh of 8 devices; no step yet."""
    notebook.run(GIVEN)
    notebook.run("%mesh data=8;")
    return notebook


@pytest.fixture
def trained(given: Notebook) -> dict[str, np.ndarray]:
    """The state after three plain steps; the notebook's own has not moved."""
    given.run(STEP + "expected = state\nfor _ in range(3):\n    expected, _ = train_step(expected, batch)")
    given.run("del train_step")
    return {name: np.asarray(value) for name, value in given["expected"].items()}


@pytest.fixture(scope="module")
def browser() -> "Browser":
    """A headless browser, which modules share that follow each other; each opens pages of its own."""
    if not _browsers:
        _browsers.append(_opened.enter_context(chromium()))
    return _browsers[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A file's tests begin with the devices that the first ones had, and without a browser unless they ask for one: its
    event loop would trouble them."""
    try:
        return (yield)
    finally:
        same_file = nextitem is not None and item.path == nextitem.path
        if not same_file:
            restore_devices(int(SETTINGS["JAX_NUM_CPU_DEVICES"]))
            _set_aside()
        if not (same_file or "browser" in _fixtures(nextitem)):
            _close_browser()


def _fixtures(item: pytest.Item | None) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _set_aside() -> None:
    """Leave what outlives a file's tests, JAX's caches above all, out of later walks over all objects: of collections
    of garbage, and of `%shard code` for the user's functions, which took up to 100 seconds after a thousand tests."""
    gc.collect()
    gc.freeze()


def _close_browser() -> None:
    _browsers.clear()
    _opened.close()


def pytest_sessionfinish() -> None:
    """After an interrupt, too."""
    _close_browser()


@pytest.fixture(scope="module")
def blank_page(browser: "Browser") -> Iterator[Stage]:
    with stage(browser) as opened:
        yield opened


@pytest.fixture
def show(blank_page: Stage) -> Iterator[Stage]:
    """`show(report)` draws it alone in a page; a console error or a request to the network fails the test."""
    yield blank_page
    blank_page.remove()
    wrong, blank_page.wrong = blank_page.wrong, []
    assert wrong == []
