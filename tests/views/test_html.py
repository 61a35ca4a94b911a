"""The HTML view: no script, nothing fetched, every key number as text, legible on white and on black."""

import re
from dataclasses import replace

import pytest
from support.markup import Reader, assert_inert, without_svg
from support.sample_reports import (
    MIB,
    SAMPLES,
    attached,
    changed,
    files,
    hostile,
    large,
    leaf,
    mesh,
    partly,
    simulated,
    too_big,
    unknown,
)

from jaxshard_magic.report import Advice, Collective
from jaxshard_magic.views import colours, svg
from jaxshard_magic.views.colours import HUES
from jaxshard_magic.views.meshgrid import mesh_html
from jaxshard_magic.views.payload import payload


@pytest.mark.parametrize("name", list(SAMPLES))
def test_every_report_is_well_formed_without_script_or_anything_fetched(name: str):
    for html in (SAMPLES[name]().to_html(), mesh_html(SAMPLES[name]().mesh)):
        assert_inert(html)


def test_names_cannot_break_out_of_the_markup():
    html = hostile().to_html()
    assert "<script" not in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in html
    assert "<b>=2" not in html
    assert "\x1b" not in html
    assert "\u91cd\u307f.\u5c64_0.kernel" in html


def test_key_numbers_stand_as_text_where_svg_and_styles_are_stripped():
    stripped = re.sub(r' (style|class)="[^"]*"', "", without_svg(attached().to_html()))
    text = Reader(stripped).text
    for said in (
        "Fits: 5.09 of 15.75 GiB on the fullest device.",
        "Bound by communication: 31% of the predicted step is all-gathers over data.",
        "47.3 ms",
        "46.8 to 49.1 ms, over all 20 calls, predicted 46.0 ms",
        "5.09 of 15.75 GiB",
        "devices 1 to 7 are alike at 4.63 GiB",
        "78.3 MiB",
        "data 705 MiB, model 288 MiB",
        "differs by 2e\u22126, limit 1e\u22124",
        "f32[50257,768@data]",
        "not cut over model, +18.4 MiB, +55.2 MiB with 2 optimizer leaves",
        "--rule \"wte=P(None,('data','model'))\"",
    ):
        assert said in text, said


def test_a_figure_that_is_not_known_is_a_dash():
    text = Reader(unknown().to_html()).text
    assert "peak memory" in text
    assert "temporaries and peak are not known" in text
    assert " 0 B" not in text


def test_simulated_devices_say_what_their_figures_mean():
    text = Reader(simulated().to_html()).text
    assert "exact for the program compiled for this CPU; a chip's own may send otherwise" in text
    assert "Times on this CPU say nothing about an accelerator; --on v5e predicts one." in text
    assert "1.84 s on this CPU, over all 3 calls but one" in text.replace("\u202f", " ")
    assert "Timing: " not in text and "Timing on this CPU" in text


def test_a_fix_of_several_lines_stays_code_that_runs():
    fix = "def halved(x):\n    return x / 2"
    report = replace(attached(), advice=(Advice("slow", "warning", "It waits:", fix),))
    assert payload(report)["advice"][0]["fix"] == fix
    assert "<code>def halved(x):</code>\n<code>    return x / 2</code>" in report.to_html()


def test_what_does_not_fit_has_its_sign_and_its_fix():
    html = too_big().to_html()
    assert "\u2716" in html
    assert "<code>--microbatches 4</code>" in html


def rows_of(html: str, head: str = "source") -> list[list[str]]:
    """The rows of the table that has a column `head`, that of lines, as text."""
    table = next(t for t in re.findall(r"<table>.*?</table>", html, flags=re.DOTALL) if f">{head}</th>" in t)
    rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], flags=re.DOTALL)
    return [[Reader(cell).text for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows]


def test_lines_stand_in_their_order_with_what_each_moves():
    rows = rows_of(attached().to_html())
    assert [row[0] for row in rows] == [
        "[7]:9", "[7]:14", "[7]:15", "gpt2.py:31", "gpt2.py:38", "gpt2.py:44", "gpt2.py:46",
    ]  # fmt: skip
    # wte, 147.2 MiB, gathered twice and its gradient reduced: 3 times three quarters at 34 GB/s
    assert rows[3][1] == 'qkv = h @ p["attn"]["qkv"]["kernel"] # from [7]:12'
    assert rows[1] == [
        "[7]:14",
        'logits = (x @ params["wte"].T).astype(jnp.float32)',
        "10.2 ms",
        "",
        "331 MiB",
        "AG data ×2, RS data",
    ]
    assert rows[0][2:] == ["278 us", "", "9.00 MiB", "A2A data"]
    text = Reader(attached().to_html()).text
    assert "AG all-gather, AR all-reduce, RS reduce-scatter, A2A all-to-all" in text


def test_collectives_of_one_kind_over_the_same_axes_are_one_row():
    html = attached().to_html()
    first, *others = rows_of(html, "collective")
    assert first == ["all-gather", "data", "98", "up to 147 MiB", "464 MiB", "", "14.3 ms"]
    assert len(others) == 4
    assert "Communication: 62% of the predicted step, 993 MiB sent by each device" in Reader(html).text


def test_the_predicted_step_is_told_in_parts():
    text = Reader(attached().to_html()).text
    assert "Predicted step 46.0 ms: compute 38% 17.6 ms, all-gather data 31% 14.3 ms" in text
    assert "Predicted step" not in simulated().to_html()


def test_lines_of_several_files_are_told_with_the_file():
    assert [row[0] for row in rows_of(files().to_html())] == [
        "[12]:20", "[12]:24", "[12]:90", "model.py:31", "model.py:210", "layers.py:1",
    ]  # fmt: skip


def test_what_is_not_traced_comes_last_and_what_is_not_exact_says_so():
    *_, fourteen, last = rows_of(partly().to_html())
    assert fourteen[2:] == ["\u2265559 us", "", "\u226524.0 MiB", "AR model ×\u226512"]
    assert last[:2] == ["\u2013", "not traced to a line"]


def test_a_source_without_text_says_why():
    html = changed().to_html()
    assert [row[:2] for row in rows_of(html)][:3] == [
        ["train.py:44", ""],
        ["gpt2.py:9", ""],
        ["gpt2.py:15", ""],
    ]
    assert ["gpt2.py:31", "# from train.py:41"] in [row[:2] for row in rows_of(html)]
    assert "gpt2.py: this file has changed since the step was traced" in Reader(html).text


def test_of_many_lines_the_forty_that_move_most_are_listed():
    many = tuple(
        Collective("all-gather", ("data",), 4, 1, n * MIB, n * MIB, line=n, file="cell [7]") for n in range(1, 51)
    )
    html = replace(simulated(), collectives=many).to_html()
    assert [row[0] for row in rows_of(html)] == [f"[7]:{n}" for n in range(11, 51)]
    assert "10 more send 55.0 MiB" in Reader(html).text  # 1 + 2 + ... + 10


def test_512_devices_and_2001_leaves_stay_small():
    report = large()
    assert len(report.leaves) == 2001
    assert len(report.to_html().encode()) < 300_000
    assert Reader(report.to_html()).text.count("all-gather ") <= 14


def test_a_report_of_leaves_that_do_not_fold_stays_small():
    axes = {"data": 2}
    letters = "abcdefghijklmnopqrstuvwxyz"
    leaves = tuple(
        leaf(f"{a}{b}{c}.kernel", (8, 9), (), axes, wanted=("data",), why="odd")
        for a in letters[:12]
        for b in letters[:13]
        for c in letters[:13]
    )
    report = replace(attached(), leaves=leaves, mesh=mesh(axes))
    assert len(leaves) == 2028
    assert len(report.to_html().encode()) < 300_000
    assert "2,016 more leaves are not cut as wanted" in Reader(report.to_html()).text


def test_to_html_writes_a_whole_document_and_returns_its_path(tmp_path):
    path = attached().to_html(tmp_path / "report.html")
    document = path.read_text(encoding="utf-8")
    assert document.startswith("<!doctype html>")
    assert '<meta charset="utf-8">' in document
    assert "prefers-color-scheme:dark" in document
    assert "<script" not in document
    assert attached().to_html() in document
    assert attached().to_html(str(tmp_path / "b.html")) == tmp_path / "b.html"


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance of #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
@pytest.mark.parametrize(
    "colour",
    colours.BOTH.values(),
)
def test_one_set_of_colours_is_seen_on_white_and_on_black(colour: str, ground: str):
    assert contrast(colour, ground) >= 3


@pytest.mark.parametrize(("theme", "ground"), [(colours.LIGHT, "#ffffff"), (colours.DARK, "#111111")])
def test_the_documents_coloured_text_is_legible(theme: dict[str, str], ground: str):
    for name in ("ink", "ink-2", *(f"a{i}" for i in range(HUES)), "warning", "error", "ok", "info"):
        assert contrast(theme[name], ground) >= 4.5, name


@pytest.mark.parametrize(
    ("shape", "spec", "said"),
    [
        ((), (), "whole, on 8 devices"),
        ((8,), ("data",), "dim 0 in 4 over data; each block on 2 devices"),
        ((8, 8), ("data", "model"), "dim 0 in 4 over data; dim 1 in 2 over model; each block on one device"),
        ((8, 8), (None, ("data", "model")), "dim 1 in 8 over data and model; each block on one device"),
    ],
)
def test_a_drawing_of_blocks_says_the_same_in_words(shape, spec, said):
    axes = {"data": 4, "model": 2}
    assert f'aria-label="{said}"' in svg.leaf_blocks(leaf("w", shape, spec, axes), mesh(axes))


def _shaded(drawing: str) -> tuple[float, float]:
    size = re.search(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="([\d.]+)" fill="currentColor"', drawing)
    assert size is not None
    return float(size[1]), float(size[2])


def test_the_shaded_part_is_what_one_device_holds():
    axes = {"data": 4, "model": 2}
    cut = svg.leaf_blocks(leaf("w", (3, 8, 8), (None, "data", "model"), axes), mesh(axes))
    assert _shaded(cut) == (svg.WIDTH / 2, svg.HEIGHT / 4)
    whole = svg.leaf_blocks(leaf("w", (8, 8), (), axes), mesh(axes))
    assert _shaded(whole) == (svg.WIDTH, svg.HEIGHT)


def test_a_line_is_drawn_at_each_cut_in_the_hue_of_its_axis():
    axes = {"data": 4, "model": 2}
    both = svg.leaf_blocks(leaf("w", (8,), (("data", "model"),), axes), mesh(axes))
    lines = re.findall(r'<path d="([^"]*)" class="jss-s(\d)"[^>]*stroke-width', both)
    assert [(path.count("M"), hue) for path, hue in lines] == [(3, "0"), (4, "1")]
    assert "M11.5 " in lines[0][0]


def test_cuts_too_fine_for_lines_are_a_tint():
    axes = {"data": 512}
    drawn = svg.leaf_blocks(leaf("w", (512, 8), ("data",), axes), mesh(axes))
    assert "stroke-width" not in drawn
    assert 'class="jss-f0"' in drawn


def test_a_mesh_table_holds_every_device_with_its_coordinates():
    read = Reader(mesh_html(mesh({"data": 4, "model": 2}, "simulated")))
    assert read.tags.count("td") == 8
    assert re.findall(r">(\d+)</td>", read.html) == [str(i) for i in range(8)]
    assert re.findall(r"<small>(\d+)</small></th>", read.html) == ["0", "1", "0", "1", "2", "3"]
    assert read.tags.count("table") == 1


@pytest.mark.parametrize("axes", [{"data": 512}, {"a": 64, "b": 8}, {"a": 8, "b": 8, "c": 8}], ids=str)
def test_a_large_mesh_is_cut(axes: dict[str, int]):
    html = mesh_html(mesh(axes))
    assert len(html) < 60_000
    assert Reader(html).tags.count("td") <= 256
