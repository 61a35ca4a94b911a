"""Candidates of a search that one reason rules out stand together, and the reason is said once."""

import re

from support.markup import Reader, without_svg
from support.sample_choices import alike, considered, without_positions

from jaxshard_magic.report.choice import REFUSED
from jaxshard_magic.views.words import choice as words


def test_a_reason_is_said_once_below_all_whom_it_ruled_out():
    found = alike()
    text, html = found.to_text(100), Reader(without_svg(found.to_html()))
    for said in (text, html.text):
        assert said.count("it needs far more than a device has") == 1
        assert said.count("sp found no dimension of positions") == 1
    rows = [line.split()[0] for line in text.splitlines() if re.match(r"  \S.*  \S+=\d", line)]
    assert rows == ["pp", "fsdp", "tp", "dp", *("dp+sp",) * 2, *("fsdp+sp",) * 2, *("fsdp+tp+sp",) * 2]
    two, one = "each of these 2: it needs far more than a device has", "its arrays alone take more"
    words_of = " ".join(text.split())
    assert f"tp model=8 290 ms 49.0 GiB {two} dp data=8 181 ms 61.3 GiB {one}" in words_of
    rows = f"tpmodel=8290 ms49.0 GiBarrays 1.20 GiB {two} dpdata=8181 ms61.3 GiBarrays 22.4 GiB {one}"
    assert rows in html.text


def test_a_reason_names_the_axis_of_the_first_and_that_of_each_who_has_another():
    ((group, why),) = words.by_reason(alike().with_outcome(REFUSED), 40)
    assert why == f"each of these 6: {without_positions('seq')} (model for seq under fsdp+tp+sp)"
    assert len(group) == 6


def test_of_a_reason_only_what_is_shown_is_counted():
    ((group, why),) = words.by_reason(alike().with_outcome(REFUSED), 3)
    assert why == f"each of these 3: {without_positions('seq')}"
    assert len(group) == 3


def test_reasons_with_other_figures_are_not_one():
    sizes = [considered("tp", {"model": n}, REFUSED, f"12 heads do not divide by model={n}") for n in (8, 256)]
    assert [why for _, why in words.by_reason(sizes, 40)] == [c.why for c in sizes]
