"""`%shard doctor`: what it finds on this machine and on others, and the remedy of each failure."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.cells import one_line

import jaxshard_magic
from jaxshard_magic.doctor import Doctor, DoctorFinding
from jaxshard_magic.doctor import devices as looking
from jaxshard_magic.doctor.connectivity import connectivity, time_all_reduce
from jaxshard_magic.doctor.devices import SystemAccelerators, devices, find_accelerators
from jaxshard_magic.doctor.environment import (
    compiler_findings,
    display_findings,
    environment_findings,
    loaded_versions,
    package_findings,
)
from jaxshard_magic.packages import NEEDED, install_command, installed, jax_requirements, satisfies

ALL = dict.fromkeys(NEEDED, "1.2.3") | {"libtpu": None}
NOTHING = SystemAccelerators()
GPU = SystemAccelerators(gpu="2 x H200")
TPU = SystemAccelerators(tpu="TPU, 4 chips")


def levels(findings) -> dict[str, str]:
    return {f.name: f.level for f in findings}


def one(findings, name: str) -> DoctorFinding:
    (found,) = [f for f in findings if f.name == name]
    return found


def refuses(monkeypatch, message: str) -> None:
    """From here on no backend starts."""

    def fails(*_):
        raise RuntimeError(message)

    monkeypatch.setattr(jax, "devices", fails)


def test_this_machine_is_well():
    found = jaxshard_magic.doctor("data=4 model=2")
    assert found.ok
    assert one(found.findings, "jax").value == jax.__version__
    (row,) = [f for f in found.findings if f.area == "devices"]
    assert row.value.startswith(f"{jax.device_count()} x ")
    assert "4 devices" in one(found.findings, "data").value
    assert "2 devices" in one(found.findings, "model").value


# Versions


@pytest.mark.parametrize(
    ("version", "clauses", "allowed"),
    [
        ("0.0.50.1", "==0.0.50.*", True),
        ("0.0.5", "==0.0.50.*", False),
        ("0.11.2", "<=0.12.0.1,>=0.11.2", True),
        ("0.12.1", "<=0.12.0.1,>=0.11.2", False),
        ("0.12.0.0", "==0.12", True),
        ("0.9.10", ">=0.9.9", True),
        ("0.10.2.dev20260101+cuda", "<=0.10.2", True),
        ("1", "", True),
        ("1", "~=2.0", True),
    ],
)
def test_a_version_fits_as_the_packaging_rules_say(version, clauses, allowed):
    assert satisfies(version, clauses) is allowed


def test_what_jax_asks_is_read_from_its_own_metadata():
    asked = jax_requirements()
    assert satisfies(installed()["jaxlib"] or "", asked["jaxlib"])
    assert asked["libtpu"].startswith("==")
    assert jax.__version__ in asked["jax-cuda12-plugin"]


def test_a_missing_package_is_told_with_its_install_line():
    found = list(package_findings(ALL | {"optax": None}, {}, {}, (3, 12)))
    assert one(found, "optax") == DoctorFinding("versions", "optax", "not installed", "error", "pip install optax")
    assert set(levels(f for f in found if f.name != "optax").values()) == {"ok"}


def test_a_jaxlib_that_jax_refuses_is_told_and_an_older_one_may_be_fine():
    asked = {"jaxlib": "<=1.2.3,>=1.1.9"}
    old = one(package_findings(ALL | {"jaxlib": "1.1.8"}, asked, {}, (3, 12)), "jaxlib")
    assert (old.level, old.remedy) == ("error", "pip install --upgrade jax jaxlib")
    assert "1.1.8" in old.value and "jax 1.2.3" in old.value
    assert one(package_findings(ALL | {"jaxlib": "1.1.9"}, asked, {}, (3, 12)), "jaxlib").level == "ok"


def test_a_package_that_was_replaced_under_the_running_kernel_is_told():
    stale = one(package_findings(ALL, {}, {"jax": "1.2.2"}, (3, 12)), "jax")
    assert (stale.level, stale.remedy) == ("warning", "restart the kernel")
    assert one(package_findings(ALL, {}, {"jax": "1.2.3"}, (3, 12)), "jax").level == "ok"
    assert loaded_versions()["numpy"] == np.__version__


def test_an_old_python_is_told_and_is_no_error():
    assert one(package_findings(ALL, {}, {}, (3, 11)), "python").level == "info"
    assert one(package_findings(ALL, {}, {}, (3, 13)), "python").level == "ok"


def test_compilers_are_told_whether_installed_or_not_and_whether_they_fit():
    assert levels(compiler_findings(ALL, {})) == {"cpu": "ok", "tpu": "info", "cuda": "info"}
    both = ALL | {"libtpu": "0.0.42", "jax-cuda12-plugin": "0.10"}
    assert levels(compiler_findings(both, {})) == {"cpu": "ok", "tpu": "ok", "cuda": "ok"}
    assert one(compiler_findings(ALL, {}), "tpu").remedy == install_command("tpu")
    mixed = one(compiler_findings(both, {"libtpu": "==0.0.50.*"}), "tpu")
    assert (mixed.level, mixed.remedy) == ("warning", install_command("tpu", "libtpu==0.0.50.*"))
    assert "0.0.42" in mixed.value and "==0.0.50.*" in mixed.value


# Environment


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("JAX_DISABLE_JIT", "1", "warning"),
        ("JAX_DISABLE_JIT", "yes", "warning"),
        ("JAX_DISABLE_JIT", "0", "ok"),
        ("JAX_DEBUG_NANS", "True", "warning"),
        ("JAX_ENABLE_X64", "1", "ok"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "warning"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "bfc", "ok"),
        ("CUDA_VISIBLE_DEVICES", "", "warning"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),
        ("NPROC", "2", "warning"),
        ("NPROC", "32", "ok"),
    ],
)
def test_a_variable_that_harms_has_a_remedy(name, value, level):
    found = one(environment_findings({name: value}), name)
    assert found.level == level
    assert (found.remedy is None) == (level == "ok")


@pytest.mark.parametrize(
    ("flags", "cpu_devices", "warned"),
    [
        ("--xla_force_host_platform_device_count=4", -1, 0),
        ("--xla_force_host_platform_device_count=4", 4, 0),
        ("--xla_force_host_platform_device_count=4", 8, 1),
        ("--xla_force_host_platform_device_count=4 xla_dump_to=here", 8, 2),
        ("--jax_platforms=cpu", -1, 1),
        ("/etc/xla_flags", -1, 0),
    ],
)
def test_xla_flags_that_do_not_hold_are_told(flags, cpu_devices, warned):
    shown, *rest = environment_findings({"XLA_FLAGS": flags}, cpu_devices)
    assert shown.level == "ok"
    assert [f.level for f in rest] == ["warning"] * warned
    assert all("XLA_FLAGS" in (f.remedy or "") for f in rest)


def test_only_variables_that_matter_are_shown():
    (found,) = environment_findings({"AWS_SECRET_ACCESS_KEY": "hidden", "HOME": "/root"})
    assert "hidden" not in found.value


def test_without_widgets_the_reports_are_html():
    assert one(display_findings(ALL | {"anywidget": None}), "reports").remedy == "pip install anywidget"
    assert one(display_findings(ALL), "reports").level == "ok"


# Devices


def test_simulated_devices_are_called_so():
    assert one(devices(ALL, {}, seen=NOTHING), "cpu").value == "8 x cpu, simulated"


@pytest.mark.parametrize("allowed", ["cpu", "tpu,cpu"])
def test_an_accelerator_that_jax_may_not_start_is_a_warning(allowed):
    found = one(devices(ALL, {}, allowed, GPU), "NVIDIA GPU")
    assert found.level == "warning" and "%env JAX_PLATFORMS=" in (found.remedy or "")


@pytest.mark.parametrize("allowed", ["", "gpu", "cuda,cpu"])
def test_an_accelerator_without_its_plugin_is_an_error_with_the_install_line(allowed):
    gpu = one(devices(ALL, {}, allowed, GPU), "NVIDIA GPU")
    assert (gpu.level, gpu.remedy) == ("error", 'pip install --upgrade "jax[cuda12]"')
    assert gpu.value.startswith("2 x H200 there")
    tpu = one(devices(ALL, {}, "", TPU), "TPU")
    assert (tpu.level, tpu.remedy) == ("error", 'pip install --upgrade "jax[tpu]"')


def test_a_hidden_gpu_and_a_driver_that_does_not_answer_are_warnings():
    hidden = one(devices(ALL, {"CUDA_VISIBLE_DEVICES": "-1"}, seen=GPU), "NVIDIA GPU")
    assert hidden.level == "warning" and "CUDA_VISIBLE_DEVICES" in hidden.value
    broken = one(devices(ALL, {}, seen=SystemAccelerators(broken="no driver")), "NVIDIA GPU")
    assert (broken.level, broken.value) == ("warning", "no driver")


def test_a_tpu_held_by_another_process_is_told_with_that_process(monkeypatch):
    refuses(
        monkeypatch,
        "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 7.\nmore",
    )
    (found,) = devices(ALL, {}, seen=NOTHING)
    assert found.level == "error" and "\n" not in found.value
    assert (found.remedy or "").startswith("!kill 7 ")


def test_a_backend_that_does_not_start_is_a_finding_with_both_ways_out(monkeypatch):
    refuses(monkeypatch, "Unable to initialize backend 'tpu': Failed to open libtpu.so")
    (found,) = devices(ALL, {}, "tpu", NOTHING)
    assert 'pip install --upgrade "jax[tpu]"' in (found.remedy or "")
    assert "%env JAX_PLATFORMS=" in (found.remedy or "")


def test_a_failure_that_nobody_knows_has_no_remedy_made_up(monkeypatch):
    refuses(monkeypatch, "the moon is full")
    assert list(devices(ALL, {}, seen=NOTHING)) == [DoctorFinding("devices", "jax", "the moon is full", "error")]


def slot(root: Path, name: str, vendor: str, device: str) -> None:
    (root / name).mkdir()
    (root / name / "vendor").write_text(f"{vendor}\n")
    (root / name / "device").write_text(f"{device}\n")


def test_tpu_chips_are_counted_on_the_bus_and_google_network_cards_are_none(tmp_path, monkeypatch):
    slot(tmp_path, "0000:00:04.0", "0x1ae0", "0x0042")  # a network card
    slot(tmp_path, "0000:00:05.0", "0x1ae0", "0x0063")  # v5e
    slot(tmp_path, "0000:00:06.0", "0x1ae0", "0x0063")
    slot(tmp_path, "0000:00:07.0", "0x10de", "0x0063")
    monkeypatch.setattr(looking, "PCI", tmp_path)
    assert find_accelerators().tpu == "TPU, 2 chips"


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "gpu", "broken"),
    [
        (
            "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'",
            "2 x H200",
            None,
        ),
        ("echo 'No devices found.'; exit 6", None, None),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None, "NVIDIA-SMI has failed"),
    ],
)
def test_nvidia_smi_alone_is_no_gpu(script, gpu, broken, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (find_accelerators().gpu, find_accelerators().broken) == (gpu, broken)


# The mesh


def test_every_device_gets_the_sum_of_its_group():
    mesh = jaxshard_magic.mesh("data=2 model=4")
    for axis in mesh.axis_names:
        seconds, right = time_all_reduce(mesh, axis, 3)
        assert right and seconds > 0


@pytest.mark.ci
@pytest.mark.parametrize(("setting", "value"), [("jax_disable_jit", True), ("jax_enable_x64", True)])
def test_a_mesh_of_explicit_axes_is_examined_under_any_setting(setting, value):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2)
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        assert set(levels(connectivity(mesh)).values()) == {"ok"}
    finally:
        jax.config.update(setting, before)


def test_the_bandwidth_is_what_a_ring_sends_over_the_measured_time():
    # On a ring of 8 each device sends 2 * 7/8 MiB; in 1.835008 ms that is 1 GB/s.
    times = {1: 2.04e-3, 2**18: 2 * 7 / 8 * 2**20 / 1e9}
    found = one(connectivity(jaxshard_magic.mesh("data=8"), measure=lambda m, a, n: (times[n], True)), "data")
    assert "measured: 4 bytes in 2.04\u202fms, 1 MiB a device at 1\u202fGB/s" in found.value


def test_a_wrong_sum_is_an_error():
    mesh = jaxshard_magic.mesh("data=8")
    found = one(connectivity(mesh, measure=lambda *_: (1e-3, False)), "data")
    assert (found.level, found.value) == ("error", "an all-reduce gave a wrong sum")


def test_a_silent_axis_is_given_up_in_time_and_the_others_are_not_tried():
    mesh = jaxshard_magic.mesh("data=4 model=2")
    answer = threading.Event()
    tried = []

    def hangs(_mesh, axis, _size):
        tried.append(axis)
        answer.wait(30)
        return 1.0, True

    start = time.perf_counter()
    found = list(connectivity(mesh, limit_s=0.2, measure=hangs))
    answer.set()
    assert time.perf_counter() - start < 10
    assert tried == ["data"]
    assert found[-1].level == "error" and "no answer after 0.2 s" in found[-1].value
    assert found[-1].remedy


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_an_axis_that_fails_says_so_in_one_line_and_does_not_read_as_a_hang(error):
    def fails(*_):
        raise error("NCCL error\nlong trace")

    found = one(connectivity(jaxshard_magic.mesh("data=8"), measure=fails), "data")
    assert (found.level, found.value) == ("error", "NCCL error")


# The magic


def test_the_magic_returns_it_and_shows_a_table_and_lines(given):
    found = given.run("%mesh data=8\n%shard doctor")
    assert isinstance(found, Doctor)
    assert one(found.findings, "axes").value == "data=8"
    assert "<table>" in found._repr_html_()
    lines = found.to_text().splitlines()
    assert lines[0] == "All is well." and all(len(line) <= 120 for line in lines)


def test_a_mesh_on_the_line_is_examined_and_the_result_kept_under_its_name(given):
    given.run('%shard doctor --mesh "data=4 model=2" -o found')
    assert one(given["found"].findings, "axes").value == "data=4 model=2"


def test_a_line_with_more_than_the_command_knows_names_what_it_takes(given, capsys):
    said = one_line(given, capsys, "%shard doctor --mesh data=4 model=2")
    assert said.endswith('unexpected: model=2; quote the mesh: --mesh "data=4 model=2"')
    said = one_line(given, capsys, "%shard doctor --check")
    assert said == "%shard doctor takes --mesh TEXT, -o VAR and nothing else; unexpected: --check"


def examined_in(code: str, tmp_path: Path, **variables: str) -> list[str]:
    """The lines that `%shard doctor --mesh data=2` prints in a fresh process after `code`."""
    code += (
        "\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'jaxshard_magic')\n"
        "print(shell.run_line_magic('shard', 'doctor --mesh data=2').to_text())\n"
    )
    env = os.environ | {"IPYTHONDIR": str(tmp_path)} | variables
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.ci
def test_a_backend_that_does_not_start_stops_no_examination(tmp_path):
    lines = examined_in("", tmp_path, JAX_PLATFORMS="nowhere")
    (said,) = [line for line in lines if "Unable to initialize backend 'nowhere'" in line]
    assert said.startswith("  ✗ jax")
    assert "environment" in lines and "mesh" not in lines


@pytest.mark.ci
def test_a_jax_that_cannot_be_imported_stops_no_examination(tmp_path):
    broken = "import jaxlib.version; jaxlib.version.__version__ = '0.0.1'"
    lines = examined_in(broken, tmp_path)
    assert any("import jax fails: jaxlib is version 0.0.1" in line for line in lines)
    assert "environment" in lines and "mesh" not in lines


def test_names_with_markup_are_text():
    found = Doctor((DoctorFinding("versions", "<b>x", "<script>alert(1)</script>", "error", "<i>pip</i>"),))
    assert "<script>" not in found.to_html() and "&lt;script&gt;" in found.to_html()
    assert found.to_text().splitlines()[0] == "1 error, each with its remedy."


def test_the_first_line_promises_no_remedy_that_is_not_there():
    found = Doctor((DoctorFinding("devices", "jax", "the moon is full", "error"),))
    assert found.to_text().splitlines()[0] == "1 error."
    assert not found.ok


def test_an_unknown_command_names_the_nearest(given, capsys):
    assert "Did you mean 'doctor'?" in one_line(given, capsys, "%shard doctr")
