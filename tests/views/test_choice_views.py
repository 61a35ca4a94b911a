"""What a search has chosen, for a reader: the sentences answer, the usual path is a tree, nothing is made up."""

import re
from dataclasses import replace

import pytest
from support.browsing import chromium
from support.markup import Reader, assert_inert, without_svg
from support.sample_choices import (
    BOTH,
    CHOICES,
    CUT,
    NARROW,
    ONE,
    PATH,
    ROWS,
    WIDE,
    all_refused,
    alone,
    considered,
    ended,
    hostile,
    many,
    measured,
    nothing_fits,
    planned,
    predicted,
    untimed,
)

from jaxshard_magic.report.choice import BOUND, CHOSEN, RUNNER_UP, Choice, Question
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.choice import decision_tree
from jaxshard_magic.views.choice.html import MOST_ROWS, page
from jaxshard_magic.views.comparison import chart
from jaxshard_magic.views.comparison import html as tables
from jaxshard_magic.views.format import SPACE, UNKNOWN
from jaxshard_magic.views.sections.choice import shares
from jaxshard_magic.views.terminal import display_width
from jaxshard_magic.views.words import choice as words

OVERLAPPING = """() => {
  const inside = (a, b) => a.x >= b.x - 1 && a.x + a.width <= b.x + b.width + 1
    && a.y >= b.y - 1 && a.y + a.height <= b.y + b.height + 1;
  const svg = document.querySelector("details svg"), boxes = [...svg.querySelectorAll("rect")].map(r => r.getBBox());
  return [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBBox();
    return !boxes.some(each => inside(box, each)) && !["yes", "no"].includes(text.textContent);
  }).map(text => text.textContent);
}"""


def told(text: str) -> str:
    return text.replace(SPACE, " ").replace("\u00a0", " ")


def lead(found: Choice) -> str:
    return told("".join(span.text for span in words.choice_lead(found)))


def counts(found: Choice) -> str:
    return told(words.choice_counts(found))


def ways(found: Choice) -> list[tuple[str, ...]]:
    return [(each.emphasis, *(branch.emphasis for branch in each.branches)) for each in decision_tree.nodes(found.path)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (  # 229 / 212 is 1.080
            predicted(),
            "fsdp+tp on data=64 model=4, --remat full: 212 ms a step predicted for TPU v5e, 12.1 of 15.75 GiB a device;"
            " 8% faster than the runner-up, fsdp on data=256 (229 ms).",
        ),
        (  # 40.4 / 38.9 is 1.039
            measured(),
            "fsdp on data=8: 38.9 ms a step measured, 4.18 of 15.75 GiB a device;"
            " 4% faster than the runner-up, dp on data=8 (40.4 ms).",
        ),
        (
            planned(),
            "fsdp on data=256: about 182 ms a step by its plan, about 12.9 of 15.75 GiB a device;"
            " the runner-up, fsdp+tp on data=64 model=4, takes about 204 ms. Nothing was compiled.",
        ),
        (
            nothing_fits(),
            "None of 3 candidates fits. The least memory is needed by fsdp on data=256, --remat full:"
            " 17.2 of 15.75 GiB a device.",
        ),
        (
            all_refused(),
            "None of 1 candidate could be run."
            " tp on model=8: 12 heads do not divide by model=8 (blocks.attn.qkv.kernel, dim 3).",
        ),
        (
            alone(),
            "dp on data=8: 39.3 ms a step predicted for TPU v5e, 5.66 of 15.75 GiB a device;"
            " there was no other candidate.",
        ),
        (
            untimed(),
            "fsdp on data=256: step time not known, 12.4 of 15.75 GiB a device; the runner-up is dp on data=256.",
        ),
        (replace(planned(), candidates=()), "There was nothing to try."),
        (
            replace(planned(), candidates=(considered("dp", WIDE, CHOSEN), considered("tp", BOTH, BOUND))),
            "dp on data=256: step time not known, peak memory not known; no other that was tried fits."
            " Nothing was compiled.",
        ),
    ],
)
def test_the_first_sentence_answers(found: Choice, said: str):
    assert lead(found) == said


def test_the_strategy_alone_is_bold():
    for found in (predicted(), planned(), untimed()):
        strong = [span.text for span in words.choice_lead(found) if span.kind == "strong"]
        assert found.chosen is not None and strong == [found.chosen.strategy]
        assert f"<b>{strong[0]}</b> on" in found.to_html()


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (212.0, 229.0, "8% faster than"),
        (10.0, 24.0, "2.4 times as fast as"),
        (10.0, 10.0, "as fast as"),
        (10.0, 10.02, "as fast as"),
        (10.0, 9.0, "10% slower than"),
    ],
)
def test_speed_is_told_in_steps_of_the_same_time(ours: float, theirs: float, said: str):
    assert words.speed_text(ours, theirs) == said


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            predicted(),
            "8 candidates considered, 4 compiled, of which 1 does not fit."
            " 2 can't be faster: what they multiply and must send already takes longer;"
            " 1 needs more memory than there is; 1 can't be planned, compiled or run. 48.2 s used of a budget of 60 s.",
        ),
        (measured(), "3 candidates considered, 3 compiled. 131 s used, no limit was set."),
        (
            nothing_fits(),
            "3 candidates considered, 2 compiled, none of which fits. 1 needs more memory than there is."
            " 22.0 s used of a budget of 60 s.",
        ),
        (all_refused(), "1 candidate considered, none compiled. 1 can't be planned, compiled or run."),
    ],
)
def test_what_was_ruled_out_is_counted(found: Choice, said: str):
    assert counts(found) == said


def test_what_the_budget_left_is_counted_and_listed():
    assert "; 5 were left when the budget of 30 s ended. 31.7 s used of a budget of 30 s." in counts(ended())
    for text in (told(ended().to_text(100)), Reader(ended().to_html()).text):
        assert "5 were left when the budget of 30 s ended" in text and "--microbatches 32" in text


def test_the_tree_has_all_questions_with_their_figures_and_all_answers():
    found = predicted()
    drawn = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", decision_tree.tree_html(found.path)))
    drawn = drawn.replace("&#x27;", "'")
    for text in (drawn, Reader(without_svg(found.to_html())).text, " ".join(found.to_text(100).split())):
        for question in PATH:
            for said in filter(None, (question.asks, question.because, question.yes, question.no)):
                assert said in text, said
    assert "not known" in drawn


def test_the_way_taken_is_strong_up_to_its_answer_and_the_others_are_quiet():
    strong, quiet = decision_tree.STRONG, decision_tree.QUIET
    assert ways(predicted()) == [
        (strong, quiet, strong),
        (strong, strong, quiet),
        (strong, strong, quiet),
        (quiet, quiet, quiet),
    ]


def test_where_an_answer_is_not_known_the_ways_from_it_are_dashed():
    unsure, quiet = decision_tree.UNSURE, decision_tree.QUIET
    assert ways(untimed()) == [
        (decision_tree.STRONG, unsure, unsure),
        (unsure, unsure, quiet),
        (unsure, unsure, quiet),
    ]
    dashed = decision_tree.tree_html(untimed().path).count("stroke-dasharray")
    # a line and a leaf; a line and a box; a line and a box; a line and a leaf
    assert dashed == 8
    assert "stroke-dasharray" not in decision_tree.tree_html(predicted().path[:3])


def test_an_unknown_answer_whose_ways_are_one_changes_nothing():
    either = Question("Are there several slices?", None, "")
    assert words.leaf_of((either, ROWS)) == "fsdp"
    assert words.leaf_of((ONE, either, CUT, ROWS)) == "fsdp"


@pytest.mark.parametrize(
    ("path", "leaf"),
    [
        (PATH, "fsdp"),
        ((replace(ONE, answer=True), CUT, ROWS), "dp"),
        ((ONE, replace(CUT, answer=False), ROWS), "pp+dp"),
        ((ONE, replace(CUT, answer=None), ROWS), None),
        ((ONE, CUT, replace(ROWS, answer=False), NARROW), None),
        ((ONE, CUT), ""),
        ((), ""),
    ],
)
def test_the_path_leads_to_one_usual_answer(path: tuple[Question, ...], leaf: str | None):
    assert words.leaf_of(path) == leaf


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (  # the best fsdp takes 229 ms
            predicted(),
            "The usual path leads to fsdp; the search found fsdp+tp,"
            " 8% faster than the best fsdp that was compiled (229 ms).",
        ),
        (measured(), "The usual path leads to fsdp, and so does the search."),
        (planned(), "The usual path leads to fsdp, and so does the search."),
        (nothing_fits(), "The usual path leads to pp+dp; the search found nothing that fits."),
        (untimed(), "Where the usual path leads is not known here."),
        (replace(predicted(), path=(ONE, CUT)), "The usual path has no answer for this step."),
        (  # dp was compiled, but does not fit
            replace(predicted(), path=(replace(ONE, answer=True),)),
            "The usual path leads to dp; the search found fsdp+tp.",
        ),
        (
            replace(predicted(), path=(replace(ONE, answer=True, yes="tp+fsdp with remat"),)),
            "The usual path leads to tp+fsdp with remat, and so does the search.",
        ),
        (alone(), ""),
    ],
)
def test_a_sentence_says_whether_the_usual_path_leads_to_what_was_found(found: Choice, said: str):
    assert told(words.agreement(found)) == said
    assert said in Reader(found.to_html()).text
    assert said in " ".join(found.to_text(100).split())


def test_what_was_compiled_stands_as_in_a_comparison():
    found = predicted()
    assert tables.trials_table(found.comparison) in found.to_html()
    assert chart.chart_with_notes(found.comparison) in found.to_html()
    text = found.to_text(100)
    assert "* fsdp+tp remat full" in text and "212 ms" in told(text)
    assert "Compiled" not in Reader(planned().to_html()).text


def test_uncompiled_candidates_stand_under_their_reason_least_bound_first():
    text = Reader(without_svg(predicted().to_html())).text
    order = [
        "2 can't be faster",
        "fsdp+tpdata=32 model=8219 ms7.70 GiBarrays 3.90 GiB sends 7.4 GiB over model",
        "tp --remat fullmodel=8 data=32231 ms8.20 GiB",
        "1 needs more memory than there is",
        "dpdata=256171 ms61.3 GiBarrays 22.4 GiB its arrays alone take 22.4 GiB",
        "1 can't be planned, compiled or run",
        f"tpmodel=256{UNKNOWN}{UNKNOWN} 12 heads do not divide",
    ]
    text = text[text.index("Not compiled, and why: 4") :]
    at = [text.index(said) for said in order]
    assert at == sorted(at)


def test_by_plans_alone_every_candidate_is_listed_and_the_table_is_open():
    html = planned().to_html()
    assert "<details open><summary><b>What is known without compiling" in html
    assert len(re.findall(r"<td[^>]*><code><b>", html)) == len(planned().candidates)
    assert "<details><summary><b>Not compiled" in predicted().to_html()


def test_of_two_hundred_forty_are_listed_and_no_group_is_left_out():
    found = many()
    assert len(found.candidates) == 200
    groups = {outcome: len(group) for outcome, group in words.not_compiled(found)}
    # 40 rows: the one that was refused, and the rest halved; the odd row goes to the first
    assert shares(list(groups.values()), MOST_ROWS) == [20, 19, 1]
    text = Reader(found.to_html()).text
    assert f"and {groups[BOUND] - 20} more" in text and "1 can't be planned" in text
    assert len(found.to_html()) < 80_000


def test_no_more_rows_are_shown_than_there_are():
    assert shares([3, 1], 40) == [3, 1]
    assert shares([100, 2, 30], 12) == [5, 2, 5]
    assert shares([], 40) == []


def test_the_lines_that_run_the_choice_and_the_runner_up_are_told():
    found = predicted()
    lines = ('%%shard fsdp+tp --mesh "data=64 model=4" --remat full', '%%shard fsdp --mesh "data=256"')
    for line in lines:
        assert "    " + line in found.to_text(60).splitlines()
    text = Reader(found.to_html()).text
    assert f"Run the choice as {lines[0]}" in text and f"Run the runner-up as {lines[1]}" in text
    assert "%%shard" not in nothing_fits().to_text(80) + nothing_fits().to_html()
    assert alone().to_text(80).count("%%shard") == 1


@pytest.mark.parametrize("name", list(CHOICES))
def test_every_choice_is_well_formed_without_script_or_anything_fetched(name: str):
    assert_inert(CHOICES[name]().to_html())


def test_names_cannot_break_out_of_the_markup_nor_move_a_cursor():
    html, text = hostile().to_html(), hostile().to_text(80)
    assert "<script" not in html and "<b>=8" not in html
    assert "\x1b" not in html + text


@pytest.mark.parametrize("width", [60, 72, 80, 100])
@pytest.mark.parametrize("name", list(CHOICES))
def test_no_line_is_wider_than_asked_but_one_to_paste(name: str, width: int):
    for line in CHOICES[name]().to_text(width).split("\n"):
        assert display_width(line) <= width or line.startswith("    ")
        assert line.isprintable()


def test_only_lines_to_paste_are_wider_than_asked():
    for found in (predicted(), ended(), many(), planned()):
        wide = [line for line in found.to_text(60).split("\n") if display_width(line) > 60]
        assert all(line.startswith("    %%shard ") for line in wide)


def test_a_figure_that_is_not_known_is_never_0():
    unknown = considered("dp", WIDE, CHOSEN), considered("tp", BOTH, RUNNER_UP)
    bare = replace(planned(), candidates=unknown, seconds=0.0)
    for found in (bare, untimed(), all_refused()):
        for text in (told(found.to_text(80)), Reader(without_svg(found.to_html())).text):
            assert not re.search(r"(?<![\d.])0 (us|ms|s|B)\b", text)
    assert f"dpdata=256{UNKNOWN}{UNKNOWN}" in Reader(bare.to_html()).text


def test_figures_of_what_was_not_compiled_are_explained_and_notes_are_told():
    for text in (" ".join(predicted().to_text(80).split()), Reader(predicted().to_html()).text):
        assert "take on TPU v5e, by its plan and with all hidden that may be" in text
        assert "estimated from the traced step" in text
    for text in (measured().to_text(80), Reader(measured().to_html()).text):
        assert "No budget was given: every candidate was compiled and run." in " ".join(text.split())
        assert "estimated from the traced step" not in text


def test_key_numbers_stand_as_text_where_svg_and_styles_are_stripped():
    stripped = re.sub(r' (style|class)="[^"]*"', "", without_svg(predicted().to_html()))
    text = Reader(stripped).text
    for said in (
        lead(predicted()),
        counts(predicted()),
        "train_step on 256 × TPU v5 lite, not attached: compiled, not run.",
        "2 rows a device: 174 ms of products at 197 TFLOP/s, 151 ms of gathers at 45 GB/s",
        "8% faster than the best fsdp that was compiled (229 ms).",
    ):
        assert said in text, said


@pytest.mark.parametrize("name", list(CHOICES))
def test_a_choice_is_read_back_from_its_json(name: str):
    found = CHOICES[name]()
    if name == "hostile":  # one of its differences is NaN, which no NaN equals
        found = replace(found, comparison=Comparison("train_step", ()))
    assert Choice.from_json(found.to_json()) == found


def test_to_html_writes_a_whole_document_and_returns_its_path(tmp_path):
    html = predicted().to_html(tmp_path / "chosen.html").read_text("utf-8")
    assert html.startswith("<!doctype html>") and predicted().to_html() in html
    assert "<title>train_step, a strategy chosen</title>" in html
    assert html == page(predicted())


@pytest.mark.ci
@pytest.mark.parametrize("width", [868, 620])
def test_nothing_is_cut_off_in_a_browser(width: int, tmp_path):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 600})
        for name, made in CHOICES.items():
            found = made() if name != "hostile" else replace(made(), comparison=Comparison("", ()))
            page.goto(found.to_html(tmp_path / "page.html").as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            if found.path:
                assert page.evaluate(OVERLAPPING) == [], name
