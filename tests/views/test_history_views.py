"""The history as a table, as JSON and as a DataFrame."""

import itertools
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from support.histories import CELL, add, kept, one_line, path
from support.markup import Reader
from support.sample_reports import (
    SAMPLES,
    attached,
    bare,
    dry,
    hostile,
    simulated,
    too_big,
    wrong,
)

from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import Calibration, History, Store, calibration, row
from jaxshard_magic.notebook.history_line import run_history_line
from jaxshard_magic.report import Report, TimeSpread
from jaxshard_magic.views import history as views
from jaxshard_magic.views.terminal import display_width

__all__ = ["kept", "path"]


NOW = datetime(2026, 11, 22, 18, 0).astimezone()


def shown(kept: Store, *reports: Report, **more) -> History:
    for report in reports:
        add(kept, report)
    return History(tuple(replace(found, at=NOW) for found in kept.rows()), kept, **more)


def test_an_empty_history_says_what_will_stand_there(kept: Store):
    said = "No report yet: the report of every %%shard cell, in any notebook, will stand here."
    assert shown(kept).to_text(100) == said
    assert Reader(shown(kept).to_html()).text == said
    assert "No report of resnet; %shard history alone shows all." in History((), kept, "resnet").to_text()


def test_measured_steps_stand_beside_predicted_ones_by_chip_and_strategy(kept: Store):
    def ran(strategy: str, measured: float, predicted: float | None) -> Report:
        report = attached()
        assert report.timing is not None
        timing = replace(report.timing, step_s=TimeSpread(measured, measured, measured), predicted_step_s=predicted)
        return replace(report, strategy=strategy, timing=timing)

    for report in (
        *(ran("fsdp", seconds, 0.1) for seconds in (0.1, 0.11, 0.15)),
        ran("dp", 0.08, 0.1),
        ran("dp", 0.08, None),  # not predicted
        simulated(),  # no chip ran it
        dry(),
    ):
        add(kept, report)
    found = calibration(kept.rows())
    assert [(r.strategy, r.count) for r in found.ratios] == [("fsdp", 3), ("dp", 1)] and found.left == 3
    assert (found.ratios[0].low, found.ratios[0].median, found.ratios[0].high) == pytest.approx((1.0, 1.1, 1.5))
    lines = [" ".join(line.split()) for line in found.to_text(80).splitlines()]
    assert lines[0] == "4 measured steps on TPU v5e."
    assert "TPU v5e fsdp 3 1.10 1.00 1.50" in lines and "TPU v5e dp 1 0.80 0.80 0.80" in lines
    assert "3 of the reports have no such pair." in Reader(found.to_html()).text
    assert "run one on an attached accelerator" in calibration([]).to_text(100)
    line, name = run_history_line("history --calibration --strategy dp -o ratios", kept)
    assert isinstance(line, Calibration) and name == "ratios" and [r.strategy for r in line.ratios] == ["dp"]
    assert "of --strategy dp on TPU v5e" in line.to_text()
    with pytest.raises(ShardError, match="leave the number and --json out"):
        run_history_line("history 3 --calibration", kept)


def test_the_table_answers_what_ran_when_how_fast_and_whether_it_fits(kept: Store):
    found = shown(kept, attached(), dry(), simulated(), too_big(), wrong(), bare())
    text = views.to_text(found, 80, NOW)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "6 reports, newest first."
    assert lines[2:4] == ["when step strategy mesh", "step time peak fits numbers"]
    at = lines.index("1 today 18:00 train_step fsdp+tp data=4 model=2")
    assert lines[at + 1] == "47.3 ms measured 5.09 of 15.75 GiB yes yes"
    dry_run = lines.index("2 today 18:00 train_step fsdp+tp data=4 model=2")
    assert lines[dry_run + 1] == "46.0 ms predicted 4.63 of 15.75 GiB yes -"
    assert lines[dry_run + 2] == """--precision bf16 --rule "wte=P(None,'data')" --dry-run"""
    rest = {line.split()[0]: below for line, below in itertools.pairwise(lines) if "18:00" in line}
    assert rest["3"] == "- 1.84 s on this CPU 4.63 GiB - -"
    assert rest["4"] == "- 17.2 of 15.75 GiB no -"
    assert rest["5"] == "47.3 ms measured 5.09 of 15.75 GiB yes no"
    assert rest["6"] == "- - - -"
    page = Reader(views.to_html(found, NOW)).text
    for said in (
        "today 18:00",
        "Train.ipynb",
        "47.3 ms",
        "predicted for TPU v5e",
        "1.84 s on this CPU",
        "\u2716 no",
        "--dry-run",
    ):
        assert said in page


@pytest.mark.parametrize("width", [20, 60, 80, 100, 300])
def test_no_line_is_wider_than_the_terminal_and_the_screen_is_safe(kept: Store, width: int):
    found = shown(kept, *(made() for made in SAMPLES.values()))
    text = found.to_text(width)
    assert max(map(display_width, text.splitlines())) <= max(60, min(100, width))
    assert "\x1b" not in text


def test_the_html_is_well_formed_without_script_or_anything_fetched(kept: Store, tmp_path: Path):
    found = shown(kept, *(made() for made in SAMPLES.values()), asked="<b>")
    for html in (found.to_html(), found.to_html(tmp_path / "page.html").read_text(encoding="utf-8")):
        read = Reader(html)
        assert not {"script", "img", "iframe", "object"} & set(read.tags)
        assert not {"src", "href"} & {name for name, _ in read.attributes}
        assert f"{len(SAMPLES)} reports of <b>, newest first." in read.text
    assert str(tmp_path) not in found.to_html(), "a shared notebook tells nothing of the machine"


def test_a_long_list_shows_fifty_and_says_how_to_see_more(kept: Store):
    add(kept, bare())
    (one,) = kept.rows()
    many = tuple(replace(one, id=number) for number in range(1300, 0, -1))
    for found, count, said in (
        (History(many, kept), 50, "and 1,250 more: %shard history --limit 200"),
        (History(many, kept, shown=200), 200, "and 1,100 more: %shard history --limit 1300"),
        (History(many[:50], kept), 50, None),
    ):
        assert found.to_text().count("spmd") == found.to_html().count("spmd") == count
        for text in (found.to_text(), Reader(found.to_html()).text):
            read = " ".join(text.split())
            assert said in read if said is not None else "more:" not in read


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (datetime(2026, 11, 22, 0, 0), "today 00:00"),
        (datetime(2026, 11, 21, 23, 59), "Nov 21 23:59"),
        (datetime(2026, 11, 3, 9, 12), "Nov 3 09:12"),
        (datetime(2025, 11, 22, 14, 3), "Nov 22 2025"),
    ],
)
def test_a_time_is_told_as_near_as_it_is(at: datetime, said: str):
    assert views.when_text(at, datetime(2026, 11, 22, 18, 0)) == said


def test_the_json_holds_reports_and_cells_in_full(kept: Store, tmp_path: Path):
    found = shown(kept, attached(), hostile())
    kept.remove([2])
    data = json.loads(found.to_json(tmp_path / "history.json").read_text(encoding="utf-8"))
    assert data == json.loads(found.to_json())
    removed, one = data["rows"]
    assert Report.from_dict(one["report"]) == attached() == found[1]
    assert (one["cell"], one["strategy"], one["peak"]) == (CELL, "fsdp+tp", found.rows[1].peak)
    assert datetime.fromisoformat(one["at"]) == NOW
    assert (removed["report"], removed["cell"], removed["strategy"]) == (None, None, "fsdp")


def test_pandas_has_the_rows_by_number(kept: Store):
    pytest.importorskip("pandas")
    table = shown(kept, attached(), bare()).to_pandas()
    assert list(table.index) == [2, 1]
    assert list(table.columns) == [name for name in row.COLUMNS if name != "id"]
    assert table.loc[1, "step_s"] == 0.0473 and table["step_s"].isna().loc[2]
    assert len(History((), kept).to_pandas()) == 0


def test_without_pandas_one_line_says_what_installs_it(kept: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ShardError) as error:
        History((), kept).to_pandas()
    one_line(error, "pip install pandas")
    assert error.value.fix == "pip install pandas"


def test_ipython_shows_text_in_a_terminal_and_html_in_a_notebook(kept: Store):
    from IPython.core.formatters import DisplayFormatter

    found = shown(kept, attached())
    data, _ = DisplayFormatter().format(found)
    assert data["text/plain"] == found.to_text()
    assert data["text/html"] == found.to_html()
