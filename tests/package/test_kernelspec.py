"""The wheel as pip installs it: the bundles are in it, and Jupyter finds and starts its kernel."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
NAME = "jaxshard-cpu8"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the package in it, built and installed as a person without a checkout gets it."""
    place = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(place)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(place), str(wheel)], check=True, capture_output=True)
    return place


def packages(prefix: Path) -> Path:
    """Where the modules lie, whatever the platform calls it."""
    (found,) = prefix.glob("**/site-packages")
    return found


def specs(prefix: Path) -> KernelSpecManager:
    """Jupyter's list of kernels, of this prefix alone."""
    return KernelSpecManager(kernel_dirs=[str(prefix / "share" / "jupyter" / "kernels")])


@pytest.fixture(scope="module")
def kernel(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """The kernel of the installed package; what this test run itself sets for jax is not passed on."""
    ours = ("JAX_", "XLA_", "NPROC", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    home = tmp_path_factory.mktemp("home")
    env |= {"PYTHONPATH": str(packages(installed)), "IPYTHONDIR": str(home), "JUPYTER_RUNTIME_DIR": str(home)}
    manager = KernelManager(kernel_name=NAME, kernel_spec_manager=specs(installed))
    manager.start_kernel(env=env, cwd=str(home))
    yield manager
    manager.shutdown_kernel(now=True)


def said(kernel: KernelManager, code: str) -> str:
    """What the kernel prints, or its error as a failure here."""
    client = kernel.blocking_client()
    client.start_channels()
    lines: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            lines.append(message["content"]["text"])

    try:
        client.wait_for_ready(timeout=60)
        reply = client.execute_interactive(code, timeout=120, output_hook=hear)["content"]
    except (Empty, TimeoutError) as silent:
        raise AssertionError(f"the kernel does not answer: {''.join(lines)}") from silent
    finally:
        client.stop_channels()
    assert reply["status"] == "ok", "\n".join(reply.get("traceback", []))
    return "".join(lines)


def test_the_kernel_has_a_name_that_tells_what_it_is_and_a_logo(installed: Path):
    found = specs(installed).get_kernel_spec(NAME)
    assert found.display_name == "Python 3 (JAX, 8 simulated devices)"
    assert (Path(found.resource_dir) / "logo-svg.svg").read_text().startswith("<svg")


def test_the_bundles_and_the_table_of_chips_are_in_the_wheel(installed: Path):
    package = packages(installed) / "jaxshard_magic"
    static = package / "static"
    assert (package / "hardware.toml").is_file()
    assert {path.name for path in static.iterdir()} == {
        "report.js",
        "compare.js",
        "explore.js",
        "live.js",
        "stop.js",
        "loader.js",
        "page.js",
    }


def test_the_sdist_has_the_sources_of_all_that(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"widgets/build.mjs", "widgets/report/index.js", f"kernels/{NAME}/kernel.json"} <= names
    assert not [name for name in names if "node_modules" in name]


def test_the_kernel_starts_with_8_devices_and_threads_for_them(kernel: KernelManager):
    code = "import os, sys, jax\nprint(jax.device_count(), jax.default_backend(), os.environ['NPROC'], sys.executable)"
    assert said(kernel, code).split() == ["8", "cpu", "32", sys.executable]


def test_the_extension_of_the_installed_package_loads_and_sees_them(kernel: KernelManager, installed: Path):
    assert said(kernel, "import jaxshard_magic\nprint(jaxshard_magic.__file__)").startswith(str(installed))
    found = said(kernel, "%load_ext jaxshard_magic\n%mesh data=4 model=2;\nprint(len(jax.devices()))")
    assert found.split()[-1] == "8"
