"""What the widget is sent: all of the report, in words and plain numbers, small, and never as markup."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sample_reports import (
    GPT,
    MIB,
    SAMPLES,
    attached,
    bare,
    files,
    gpt_leaves,
    hostile,
    large,
    leaf,
    looped,
    measured,
    memory,
    mesh,
    one_device,
    partly,
    simulated,
    too_big,
    unknown,
    wrong,
)

from jaxshard_magic.report import (
    Advice,
    Buffer,
    Check,
    Collective,
    Memory,
    Report,
    SourceExcerpt,
    TimeSpread,
    Timing,
)
from jaxshard_magic.views import words
from jaxshard_magic.views.format import SPACE
from jaxshard_magic.views.payload import packed_report, payload

KINDS = {"text", "strong", "axis", "code", "memory", "line"}


def unpacked(data: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(data))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *strings(item))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def said(spans: list[list[str]]) -> str:
    return "".join(text for text, _ in spans).replace(SPACE, " ").replace("\u00a0", " ")


@pytest.mark.parametrize("name", list(SAMPLES))
def test_every_report_packs_and_unpacks_as_it_was(name):
    report = SAMPLES[name]()
    assert unpacked(packed_report(report)) == json.loads(json.dumps(payload(report)))


@pytest.mark.parametrize("name", list(SAMPLES))
def test_the_words_are_those_of_the_text_and_the_html(name):
    report, data = SAMPLES[name](), payload(SAMPLES[name]())
    spans = data["verdict"]["spans"] + (data["memory"] or data["verdict"]).get("lead", [])
    assert {kind for _, kind in spans} <= KINDS
    if name != "hostile":
        assert "".join(text for text, _ in data["verdict"]["spans"]) == words.verdict(report).text
    assert [*data["foot"], *data["notes"]] == words.notes(report)
    assert [f["value"] for f in data["figures"]] == [f.value for f in words.key_figures_of(report)]


def test_the_verdict_has_a_place_that_leads_to_memory():
    assert ["the fullest device", "memory"] in payload(attached())["verdict"]["spans"]
    assert ["every device", "memory"] in payload(too_big())["verdict"]["spans"]
    assert "memory" not in {kind for _, kind in payload(one_device())["verdict"]["spans"]}


def test_tabs_carry_one_number_each_and_are_absent_where_there_is_nothing():
    def tabs(report: Report) -> list[str]:
        return [f"{t['label']} {t['number']}".replace(SPACE, " ") for t in payload(report)["tabs"]]

    assert tabs(attached()) == ["Layout 45 leaves", "Memory 5.09 GiB", "Communication 62%"]
    assert tabs(simulated())[-1] == "Communication 993 MiB"
    assert tabs(one_device())[-1] == "Communication nothing"
    assert tabs(unknown()) == ["Layout 45 leaves", "Memory –"]
    assert tabs(bare()) == []
    assert tabs(replace(attached(), leaves=attached().leaves[:1]))[0] == "Layout 1 leaf"


def test_a_figure_opens_its_view_if_the_report_has_one():
    assert [f["opens"] for f in payload(attached())["figures"][:3]] == [None, "memory", "communication"]
    assert [f["opens"] for f in payload(bare())["figures"]] == [None] * 5


def test_figures_come_with_what_is_drawn_under_them():
    step, peak, sent, _, same = (f["mark"] for f in payload(attached())["figures"])
    spread = {"kind": "range", "min": 0.0468, "median": 0.0473, "max": 0.0491}
    assert step == spread | {"predicted": pytest.approx(0.046, abs=1e-4)}
    assert peak["kind"] == "share" and round(peak["share"], 2) == 0.32
    assert sent["kind"] == "axes" and [axis for axis, _ in sent["parts"]] == [0, 1, 0]
    assert sum(share for _, share in sent["parts"]) == pytest.approx(1)
    assert same == {"kind": "limit", "value": 2e-6, "limit": 1e-4, "ok": True}


def test_signs_say_which_figures_are_right_and_wrong():
    assert [f["sign"] for f in payload(attached())["figures"]] == [None, None, None, None, "ok"]
    assert payload(wrong())["figures"][4]["sign"] == "error"
    assert payload(too_big())["figures"][1]["sign"] == "error"


def test_figures_that_are_not_finite_are_left_out():
    nan, inf = float("nan"), float("inf")
    report = replace(
        attached(),
        timing=Timing(None, 3, 3, TimeSpread(0.1, 0.2, 0.3), nan, None),
        collectives=(Collective("all-reduce", ("data",), 4, 1, 8, 8, seconds=inf),),
        check=Check(False, inf, nan, 1e-4, "one device"),
    )
    data = unpacked(packed_report(report))
    assert data["figures"][0]["mark"]["predicted"] is None
    assert data["figures"][4]["mark"] is None
    assert data["communication"]["rows"][0]["seconds"] is None


def test_a_leaf_tells_its_axes_by_their_place_in_the_mesh():
    data = payload(attached())
    i = data["leaves"]["path"].index("blocks.attn.out.kernel")
    assert data["mesh"]["axes"] == [["data", 4], ["model", 2]]
    assert data["leaves"]["spec"][i] == [[], [1], [], [0]]
    assert data["leaves"]["dtype"][i] == "f32"
    assert data["whys"][data["leaves"]["why"][i]].startswith("tp: row kernel")


def test_a_spec_has_an_entry_for_every_dimension():
    data = payload(SAMPLES["shapes"]())
    assert [len(s) for s in data["leaves"]["spec"]] == [len(s) for s in data["leaves"]["shape"]]
    assert data["leaves"]["spec"][data["leaves"]["path"].index("pair")] == [[1, 2], []]


def test_an_axis_that_the_mesh_lacks_has_size_one():
    odd = leaf("w", (8, 8), ("data",), GPT)
    ghost = replace(odd, spec=("gone", ("data", "lost")), wanted=("wish",))
    moved = Collective("all-reduce", ("never",), 4, 1, 8, 8)
    data = payload(replace(attached(), leaves=(ghost,), collectives=(moved,)))
    assert data["mesh"]["axes"][2:] == [["gone", 1], ["lost", 1], ["wish", 1], ["never", 1]]
    assert data["leaves"]["spec"] == [[[2], [0, 3]]]
    assert data["short"]["0"]["wanted"] == [4]


def test_repeated_layers_fold_and_every_leaf_is_in_one_row():
    data = payload(large())
    assert [path for _, path, _ in data["rows"]][:3] == [
        "wte.embedding",
        "blocks.0-399.attn.qkv.kernel",
        "blocks.0-399.attn.out.kernel",
    ]
    assert sorted(i for _, _, members in data["rows"] for i in members) == list(range(2001))


def test_two_alike_stay_two_rows_and_so_do_layers_with_a_gap_in_two_numbers():
    def rows(*paths: str) -> list[str]:
        leaves = tuple(leaf(path, (8,), (), GPT) for path in paths)
        return [path for _, path, _ in payload(replace(bare(), leaves=leaves))["rows"]]

    assert rows("b.0.w", "b.1.w") == ["b.0.w", "b.1.w"]
    assert rows("b.0.w", "a", "b.1.w", "b.2.w") == ["b.0-2.w", "a"]
    assert rows("b.0.c.1", "b.0.c.2", "b.1.c.1", "b.1.c.2") == ["b.0-1.c.1-2"]
    assert rows("b.0.c.1", "b.1.c.1", "b.1.c.2") == ["b.0.c.1", "b.1.c.1", "b.1.c.2"]
    assert rows("n" + "9" * 5000, "n" + "8" * 5000, "m") == ["n" + "9" * 5000, "n" + "8" * 5000, "m"]


def test_rows_stand_role_by_role_in_the_order_of_the_arguments():
    data = payload(replace(attached(), leaves=tuple(reversed(gpt_leaves()))))
    roles = [role for role, _, _ in data["rows"]]
    assert list(dict.fromkeys(roles)) == ["params", "optimizer", "batch", "rng"]
    assert roles == sorted(roles, key=["params", "optimizer", "batch", "rng"].index)
    assert data["rows"][0][:2] == ["params", "ln_f.bias"]


def test_what_is_not_cut_as_wanted_says_what_it_costs_with_its_followers():
    short = payload(attached())["short"]
    first = short["0"]
    assert (first["wanted"], first["followers"], first["fix"]) == ([1], 2, None)
    assert first["total"] == 3 * first["lost"]
    assert [entry["followers"] for entry in short.values()] == [2, 0, 0]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("params.w is not cut over data: 7 does not divide.", True),
        ("Whole on every device is params.w.", True),
        ("params.w2 is not cut.", False),
        ("params.w.scale is not cut.", False),
        ("my.params.w is not cut.", False),
        ("params.w[0] is not cut.", False),
    ],
)
def test_a_fix_belongs_to_the_leaf_that_its_advice_names(message, named):
    one = leaf("params.w", (7, 8), (), GPT, wanted=("data",))
    advice = (Advice("hold", "info", "params.w"), Advice("not-cut", "warning", message, "--rule"))
    short = payload(replace(attached(), leaves=(one,), advice=advice))["short"]
    assert short["0"]["fix"] == ("--rule" if named else None)


def test_a_check_points_at_the_leaves_whose_numbers_differ():
    leaves = tuple(leaf(p, (8,), (), GPT) for p in ("state.n", "state.params.w", "batch.x"))
    check = Check(False, 1.0, 1.0, 1e-4, "one device", ("state.n",), ("0.params.w", "1.loss"))
    data = payload(replace(attached(), leaves=leaves, check=check))
    assert (data["failed"], data["noise"]) == ([1], [0])
    assert data["check"]["lines"][1] == ["2 leaves not the same:", [["0.params.w", ""], ["1.loss", ""]]]


def test_memory_stands_in_the_order_of_the_mesh():
    order = (3, 1, 2, 0)
    report = replace(
        attached(),
        mesh=mesh({"data": 4}, devices=order),
        memory=memory(gpt_leaves(), 4, 100 * MIB, 16128 * MIB, {2: 900 * MIB}),
    )
    data = payload(report)["memory"]
    assert data["devices"]["device"] == list(order)
    assert data["devices"]["other"].index(max(data["devices"]["other"])) == order.index(2)
    assert data["groups"][0] == {"text": "device\u00a02", "stage": "", "members": [2], "top": 2}
    assert data["groups"][1]["members"] == [0, 1, 3]
    assert said(data["lead"]).startswith("Device 2 is fullest, ")
    assert data["limit_text"].replace(SPACE, " ") == "15.75 GiB"


def test_memory_that_is_not_known_is_null_and_not_zero():
    data = payload(unknown())["memory"]
    assert data["devices"]["temporaries"] == data["devices"]["peak"] == [None] * 8
    assert data["roles"] == ["params", "optimizer", "batch", "other"]
    assert said(data["lead"]).endswith("of arrays. Temporaries and peak are not known.")


def test_measured_peaks_stand_in_the_order_of_the_mesh():
    peaks = [d.measured for d in measured().memory.per_device]  # type: ignore[union-attr]
    assert payload(measured())["memory"]["devices"]["measured"] == peaks and peaks[-1] is None
    assert payload(attached())["memory"]["devices"]["measured"] == [None] * 8


def test_devices_of_another_process_have_no_memory():
    rows = attached().memory.per_device  # type: ignore[union-attr]
    data = payload(replace(attached(), memory=Memory(rows[:4], "measured")))["memory"]
    assert data["devices"]["peak"][4:] == [None] * 4
    assert data["source"] == "measured"
    assert payload(replace(attached(), memory=Memory((), "measured")))["memory"] is None


def test_communication_is_listed_by_what_is_sent():
    data = payload(simulated())["communication"]
    assert said(data["lead"]) == "993 MiB sent by each device per step, most over data."
    sent = [row["wire_bytes"] for row in data["rows"]]
    assert sent == sorted(sent, reverse=True) and sum(sent) == data["total"]
    assert sum(row["share"] for row in data["rows"]) == pytest.approx(1)
    nothing = payload(one_device())["communication"]
    assert nothing["rows"] == [] and said(nothing["lead"]) == "Nothing moves between devices in this step."


def test_collectives_name_their_sources_by_place():
    data = payload(files())["communication"]
    assert [source["name"] for source in data["sources"]] == ["cell [12]", "model.py", "layers.py"]
    assert {(row["source"], row["line"]) for row in data["rows"]} == {
        (0, 20), (0, 24), (0, 90), (1, 31), (1, 210), (2, 1),
    }  # fmt: skip
    lines = data["sources"][1]["lines"]
    assert lines[0] == [28, "        h1 = self.dense(h0, 1)"] and lines[-1][0] == 213


def test_two_sources_of_one_name_are_told_apart_by_their_text():
    def gather(line: int, text: str | None) -> Collective:
        return Collective("all-gather", ("data",), 4, 1, 8, 6, line=line, source=text, file="model.py")

    first, second = (
        SourceExcerpt("model.py", (7, 8), ("a", "b")),
        SourceExcerpt("model.py", (7, 8, 30), ("  c", "d", "e")),
    )
    rows = (gather(7, "a"), gather(7, "c"), gather(30, None), gather(99, "x"))
    report = replace(attached(), sources=(first, second), collectives=rows)
    data = payload(report)["communication"]
    assert [(row["line"], row["source"]) for row in data["rows"]] == [(7, 0), (7, 1), (30, 1), (99, 0)]
    held = Buffer(8, 1, "f32", (2,), "add", file="model.py", line=30)
    assert report.memory is not None
    report = replace(report, memory=replace(report.memory, buffers=(held,), others=(0, 0)))
    (buffer,) = payload(report)["memory"]["buffers"]
    assert (buffer["source"], buffer["text"]) == (1, "e")


def test_a_total_with_a_count_that_the_program_decides_is_a_least():
    report = partly()  # two of its all-reduces run at least so often
    lead = said(payload(report)["communication"]["lead"])
    assert lead.startswith("24% of the predicted step is communication: ≥5.62 ms of ≥23.2 ms, what")
    assert "≥189 MiB sent by each device." in lead
    untimed = replace(report, timing=None)
    assert said(payload(untimed)["communication"]["lead"]).startswith("≥189 MiB sent by each device")
    assert payload(untimed)["tabs"][-1]["number"].startswith("≥")
    assert payload(untimed)["figures"][2]["value"].startswith("≥")
    assert "≥189" in untimed.to_html().partition("Communication:")[2][:40]
    exact = replace(report, collectives=tuple(replace(c, exact=True) for c in report.collectives or ()))
    assert "≥" not in exact.to_text() + exact.to_html() + said(payload(exact)["communication"]["lead"])


def test_the_predicted_step_comes_in_parts_that_make_it_up():
    data = payload(attached())
    assert data["time"]["parts"][0] == ["compute", None, pytest.approx(0.0176), "17.6\u202fms"]
    assert sum(part[2] for part in data["time"]["parts"]) == pytest.approx(data["communication"]["step_s"])
    assert [part[:2] for part in data["time"]["parts"][1:4]] == [
        ["all-gather", [0]], ["reduce-scatter", [0]], ["all-reduce", [1]],
    ]  # fmt: skip
    assert payload(simulated())["time"] is None


def test_waiting_for_memory_is_a_part_of_its_own_in_the_verdict():
    time = payload(looped())["time"]
    assert [row[:2] for row in time["parts"][: time["own"]]] == [["compute", None], ["memory", None]]
    assert [row[2] for row in time["parts"][:2]] == [pytest.approx(0.0067), pytest.approx(0.0109)]
    assert "memory 24%" in looped().to_html() and "\n  memory " in looped().to_text(80)


def test_advice_opens_with_its_first_clause():
    first, second = payload(attached())["advice"]
    assert first["head"] == "wte is not cut over model:"
    assert first["rest"].startswith("50257 does not divide by 2. With")
    assert (second["head"], second["rest"][:7]) == ("", "475 MiB")


def test_hostile_names_travel_as_plain_strings_without_control_characters():
    packed = payload(hostile())
    found, fixes = list(strings(packed)), {hint["fix"] for hint in packed["advice"]}
    assert any("<script>alert('x')</script>" in text for text in found)
    assert "<b>" in found
    assert not any(c in text for text in found for c in "\x1b\r\0")
    assert not any("\n" in text for text in found if text not in fixes), "what is to be pasted keeps its lines"


def test_numbers_of_numpy_are_numbers():
    one = replace(
        leaf("w", (8,), ("data",), GPT),
        bytes=np.int64(32),
        shape=(np.int32(8),),
        bytes_per_device=np.uint8(8),
    )
    data = unpacked(packed_report(replace(attached(), leaves=(one,))))
    assert (data["leaves"]["bytes"], data["leaves"]["shape"]) == ([32], [[8]])


def test_512_devices_and_2001_leaves_pack_small():
    assert len(packed_report(large())) < 30_000


def test_2000_unlike_leaves_on_unlike_devices_pack_below_150_kb():
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (2000, 2, 12))
    names = ["state.params." + ".".join("".join(word) for word in pair) for pair in letters]
    axes = {"data": 64, "model": 8}
    leaves = tuple(
        leaf(f"{name}.kernel", (64 * (i % 97 + 1), 8 * i), ("data", "model"), axes, why=f"dim {i}")
        for i, name in enumerate(names, 1)
    )
    extra = {d: d * 7919 * MIB // 1000 for d in range(512)}
    report = replace(large(), leaves=leaves, memory=memory(leaves, 512, 10**9, 16128 * MIB, extra))
    assert len(payload(report)["rows"]) == 2000
    assert len(packed_report(report)) < 150_000
