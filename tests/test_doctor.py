"""`%shard doctor`: what it finds on this machine and on others, and the remedy of each failure."""

import threading
import time

import jax
import numpy as np
import pytest
from cells import one_line

import jaxshard_magic
from jaxshard_magic.doctor import Doctor, Finding
from jaxshard_magic.doctor.connectivity import all_reduce, connectivity
from jaxshard_magic.doctor.devices import devices
from jaxshard_magic.doctor.setup import NEEDED, environment, installed, notebook, targets, versions

ALL = dict.fromkeys(NEEDED, "1.2.3") | {"libtpu": None}


def levels(findings) -> dict[str, str]:
    return {f.name: f.level for f in findings}


def one(findings, name: str) -> Finding:
    (found,) = [f for f in findings if f.name == name]
    return found


def test_this_machine_is_well():
    found = jaxshard_magic.doctor("data=4 model=2")
    assert found.ok
    assert one(found.findings, "jax").value == jax.__version__
    (row,) = [f for f in found.findings if f.area == "devices"]
    assert row.value.startswith(f"{jax.device_count()} x ")
    assert "4 devices" in one(found.findings, "data").value
    assert "2 devices" in one(found.findings, "model").value


def test_a_missing_package_is_told_with_its_install_line():
    found = list(versions(ALL | {"optax": None}, (3, 12)))
    assert one(found, "optax") == Finding("versions", "optax", "not installed", "error", "pip install optax")
    assert set(levels(f for f in found if f.name != "optax").values()) == {"ok"}


def test_a_jaxlib_of_another_jax_is_told():
    found = one(versions(ALL | {"jaxlib": "1.1.9"}, (3, 12)), "jaxlib")
    assert (found.level, found.remedy) == ("error", "pip install --upgrade jax jaxlib")
    assert one(versions(ALL | {"jaxlib": "1.2.0"}, (3, 12)), "jaxlib").level == "ok"


def test_an_old_python_is_told_and_is_no_error():
    assert one(versions(ALL, (3, 11)), "python").level == "info"
    assert one(versions(ALL, (3, 13)), "python").level == "ok"


def test_compilers_are_told_whether_installed_or_not():
    assert levels(targets(ALL)) == {"cpu": "ok", "tpu": "info", "cuda": "info"}
    assert levels(targets(ALL | {"libtpu": "0.0.42", "jax-cuda12-plugin": "0.10"})) == {
        "cpu": "ok",
        "tpu": "ok",
        "cuda": "ok",
    }
    assert one(targets(ALL), "tpu").remedy == "pip install libtpu"


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("JAX_DISABLE_JIT", "1", "warning"),
        ("JAX_DISABLE_JIT", "0", "ok"),
        ("JAX_DEBUG_NANS", "True", "warning"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "warning"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "bfc", "ok"),
        ("CUDA_VISIBLE_DEVICES", "", "warning"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "ok"),
        ("NPROC", "2", "warning"),
        ("NPROC", "32", "ok"),
    ],
)
def test_a_variable_that_harms_has_a_remedy(name, value, level):
    found = one(environment({name: value}), name)
    assert found.level == level
    assert (found.remedy is None) == (level == "ok")


def test_a_fixed_number_of_cpu_devices_is_told_with_the_mesh_that_replaces_it():
    found = list(environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_foo"}))
    assert "%mesh cpu:4 data=4" in (found[1].remedy or "")


def test_only_variables_that_matter_are_shown():
    (found,) = environment({"AWS_SECRET_ACCESS_KEY": "hidden", "HOME": "/root"})
    assert "hidden" not in found.value


def test_an_accelerator_that_jax_does_not_use_is_told_why():
    cpu = {"JAX_PLATFORMS": "cpu"}
    hidden = one(devices(ALL, cpu, seen=(True, False)), "NVIDIA GPU")
    assert hidden.level == "warning" and "unset JAX_PLATFORMS" in (hidden.remedy or "")
    without = one(devices(ALL, {}, seen=(True, False)), "NVIDIA GPU")
    assert (without.level, without.remedy) == ("error", 'pip install --upgrade "jax[cuda12]"')
    tpu = one(devices(ALL, {}, seen=(False, True)), "TPU")
    assert (tpu.level, tpu.remedy) == ("error", 'pip install --upgrade "jax[tpu]"')
    assert levels(devices(ALL, {}, seen=(False, False))) == {"cpu": "ok"}


def test_a_backend_that_does_not_start_is_a_finding_and_no_crash(monkeypatch):
    busy = (
        "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 7.\nmore"
    )

    def fails(*_):
        raise RuntimeError(busy)

    monkeypatch.setattr(jax, "devices", fails)
    (found,) = devices(ALL, {}, seen=(False, False))
    assert found.level == "error" and "\n" not in found.value and "pid 7" in found.value
    assert "stop the other process" in (found.remedy or "")


def test_every_device_gets_the_sum_of_its_group():
    mesh = jaxshard_magic.mesh("data=2 model=4")
    for axis in mesh.axis_names:
        seconds, right = all_reduce(mesh, axis, 3)
        assert right and seconds > 0


def test_a_wrong_sum_is_an_error():
    mesh = jaxshard_magic.mesh("data=8")
    found = one(connectivity(mesh, summed=lambda *_: (1e-3, False)), "data")
    assert (found.level, found.value) == ("error", "an all-reduce gave a wrong sum")


def test_an_axis_that_does_not_answer_is_given_up_after_its_time_and_the_others_are_not_tried():
    mesh = jaxshard_magic.mesh("data=4 model=2")
    answer = threading.Event()
    tried = []

    def hangs(_mesh, axis, _size):
        tried.append(axis)
        answer.wait(30)
        return 1.0, True

    start = time.perf_counter()
    found = list(connectivity(mesh, limit_s=0.2, summed=hangs))
    answer.set()
    assert time.perf_counter() - start < 10
    assert tried == ["data"]
    assert found[-1].level == "error" and "no answer after 0.2 s" in found[-1].value
    assert found[-1].remedy


def test_an_axis_that_fails_says_so_in_one_line():
    def fails(*_):
        raise RuntimeError("NCCL error\nlong trace")

    found = one(connectivity(jaxshard_magic.mesh("data=8"), summed=fails), "data")
    assert (found.level, found.value) == ("error", "NCCL error")


def test_without_widgets_the_reports_are_html():
    assert one(notebook(ALL | {"anywidget": None}), "reports").remedy == "pip install anywidget"
    assert one(notebook(ALL), "reports").level == "ok"


def test_what_is_installed_is_read_and_nothing_is_started():
    assert installed()["jax"] == jax.__version__
    assert installed()["numpy"] == np.__version__


def test_the_magic_returns_it_and_shows_a_table_and_lines(given):
    found = given.run("%mesh data=8\n%shard doctor")
    assert isinstance(found, Doctor)
    assert one(found.findings, "axes").value == "data=8"
    assert "<table>" in found._repr_html_()
    lines = found.to_text().splitlines()
    assert lines[0] in ("All is well.",) or "remedy" in lines[0]
    assert all(len(line) <= 120 for line in lines)


def test_names_with_markup_are_text():
    found = Doctor((Finding("versions", "<b>x", "<script>alert(1)</script>", "error", "<i>pip</i>"),))
    assert "<script>" not in found.to_html() and "&lt;script&gt;" in found.to_html()
    assert found.to_text().splitlines()[0] == "1 error, each with its remedy."


def test_an_unknown_command_names_the_nearest(given, capsys):
    assert "Did you mean 'doctor'?" in one_line(given, capsys, "%shard doctr")
