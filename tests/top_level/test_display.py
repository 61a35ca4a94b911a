"""Renderers of results: each is there, and each class of results finds its own."""

import subprocess
import sys
from importlib import import_module

import pytest

from jaxshard_magic import display
from jaxshard_magic.report import Report
from jaxshard_magic.views import RENDERERS

LOCATIONS = sorted({where for renderers in RENDERERS.values() for where in renderers.values()})


def at(location: str):
    module, _, name = location.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_registered_renderer_can_be_imported(location):
    assert callable(at(location))


@pytest.mark.parametrize("cls", RENDERERS)
def test_a_registered_class_exists(cls):
    assert isinstance(at(":".join(cls.rsplit(".", 1))), type)


def test_a_subclass_has_the_renderers_of_its_base():
    class Mine(Report):
        pass

    mine = object.__new__(Mine)
    assert display.renderer(mine, "text") is at("jaxshard_magic.views.text:of_report")
    assert display.renderer(mine, "png") is at("jaxshard_magic.views.picture_sheet:png")


def test_a_class_without_a_renderer_is_named():
    with pytest.raises(LookupError, match="no renderer of kind 'text' is registered for int"):
        display.renderer(3, "text")


def test_a_process_that_imports_reports_alone_shows_one():
    code = (
        "import sys; from jaxshard_magic.report import MeshInfo, Report;"
        "report = Report('step', 'dp', {}, MeshInfo({'data': 1}, 'cpu', 'cpu', 'attached', (0,), 1));"
        "assert 'step' in report.to_text() and 'step' in report.to_html();"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
