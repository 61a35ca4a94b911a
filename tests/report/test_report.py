"""A Report is plain data: JSON there and back, and one line where the JSON is wrong."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from support.sample_reports import SAMPLES, attached, bare, hostile, shapes

from jaxshard_magic.errors import ShardError
from jaxshard_magic.packages import upgrade_command
from jaxshard_magic.report import SCHEMA, DeviceMemory, Report


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "hostile"])
def test_json_gives_back_an_equal_report(name: str):
    report = SAMPLES[name]()
    assert Report.from_json(report.to_json()) == report
    assert Report.from_dict(report.to_dict()) == report


def test_figures_that_are_not_finite_survive_as_strict_json():
    report = hostile()

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads(report.to_json(), parse_constant=refuse)
    back = Report.from_dict(data)
    assert data["check"]["max_abs_diff"] == "Infinity"
    assert back.check is not None and back.check.max_rel_diff is not None
    assert math.isnan(back.check.max_rel_diff)
    assert back.to_dict() == report.to_dict()


def test_the_dict_has_the_fields_that_the_schema_names():
    data = attached().to_dict()
    assert data["schema"] == SCHEMA == 1
    assert data["mesh"] == {
        "axes": {"data": 4, "model": 2},
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "source": "attached",
        "devices": [0, 1, 2, 3, 4, 5, 6, 7],
        "processes": 1,
        "hosts": [],
        "islands": [],
    }
    assert data["leaves"][0]["spec"] == [None, "data"]
    assert data["memory"]["per_device"][0].keys() == {f.name for f in fields(DeviceMemory)}
    assert data["pipeline"] is None


def test_a_spec_with_two_axes_on_one_dimension_keeps_its_shape():
    report = shapes()
    pair = next(x for x in report.leaves if x.path == "pair")
    assert pair.spec == (("fsdp", "model"), None)
    back = Report.from_json(report.to_json())
    assert next(x for x in back.leaves if x.path == "pair").spec == pair.spec


def test_options_that_are_not_plain_data_become_their_text():
    report = replace(bare(), options={"specs": {"x": complex(1, 2)}, "n": True})
    assert report.to_dict()["options"] == {"specs": {"x": "(1+2j)"}, "n": True}


def _with_size(data: dict, size: object) -> dict:
    return data | {"mesh": data["mesh"] | {"axes": {"data": size}}}


def _without(data: dict, key: str) -> dict:
    return {k: v for k, v in data.items() if k != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {}, "this is no report: it has no schema, a report has schema 1"),
        (lambda d: d | {"schema": "1"}, "this is no report: it has schema '1', a report has schema 1"),
        (lambda d: d | {"schema": 2}, "this report has schema 2; this version of jaxshard_magic reads sche"),
        (lambda d: _without(d, "mesh"), "report lacks the field 'mesh'"),
        (lambda d: d | {"leafs": []}, "report has no field 'leafs'. Did you mean 'leaves'"),
        (lambda d: d | {"name": 3}, "report.name must be a string, not a whole number"),
        (lambda d: d | {"leaves": {}}, "report.leaves must be a list, not an object"),
        (lambda d: d | {"leaves": [3]}, r"report.leaves\[0\] must be an object, not a whole number"),
        (lambda d: _with_size(d, "4"), "report.mesh.axes.data must be a whole number, not a string"),
        (lambda d: _with_size(d, True), "report.mesh.axes.data must be a whole number, not true or false"),
        (lambda d: d | {"leaves": [d["leaves"][0] | {"spec": [1]}]}, r"report.leaves\[0\].spec\[0\] must be"),
    ],
)  # fmt: skip
def test_a_wrong_dict_is_one_line_that_names_the_field(change, message: str):
    with pytest.raises(ShardError, match=message) as error:
        Report.from_dict(change(attached().to_dict()))
    assert "\n" not in str(error.value)


def test_a_newer_schema_says_how_to_read_it():
    with pytest.raises(ShardError) as error:
        Report.from_dict(attached().to_dict() | {"schema": SCHEMA + 1})
    assert error.value.fix == upgrade_command()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not a report: .* at line 1"), ("[1]", "not a list"), ("3", "not a whole")]
)
def test_text_that_is_no_report_is_one_line(text: str, message: str):
    with pytest.raises(ShardError, match=message):
        Report.from_json(text)


def test_the_repr_is_short_however_large_the_report():
    assert repr(attached()) == "<Report 'train_step': fsdp+tp on data=4 model=2, 45 leaves>"


def test_ipython_shows_text_in_a_terminal_and_html_in_a_notebook():
    from IPython.core.formatters import DisplayFormatter

    shown, _ = DisplayFormatter().format(attached())
    assert shown["text/plain"] == attached().to_text()
    assert shown["text/html"] == attached().to_html()


def test_a_report_is_read_and_shown_without_jax(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(attached().to_json(), encoding="utf-8")
    script = f"""
import sys
for name in ("jax", "plotly", "ipywidgets", "anywidget", "IPython"):
    sys.modules[name] = None
from jaxshard_magic.report import Report
from jaxshard_magic.views import meshgrid
report = Report.from_json(open({str(file)!r}, encoding="utf-8").read())
report.to_text(), report.to_html(), meshgrid.mesh_text(report.mesh), meshgrid.mesh_html(report.mesh)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
