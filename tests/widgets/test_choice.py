"""The widget of an automatic search: a comparison of what it compiled, and what led to its choice."""

import pytest
from support.browsing import Stage, expect
from support.sample_choices import CHOICES, measured, planned, predicted
from support.thinned import thinned

from jaxshard_magic.views.comparison.widget import ChoiceView
from jaxshard_magic.views.sections.choice import run_commands


@pytest.mark.parametrize("name", thinned(CHOICES, ("many", "ended")))
def test_every_choice_is_drawn_and_nothing_stands_out_of_it(name: str, show: Stage):
    for width, theme in ((900, "light"), (620, "dark")):
        shown = show(CHOICES[name](), None, width, theme)
        for folded in shown.root.locator("details:not([open])").all():
            folded.locator("summary").click()
        assert "could not be drawn" not in shown.root.inner_text()
        assert shown.overflowing() == []
        assert shown.violations() == []


def test_the_lines_that_run_the_choice_and_the_runner_up_are_copied(show: Stage):
    choice = predicted()
    shown = show(choice)
    for (_, line), term in zip(run_commands(choice), ("Run the choice as", "Run the runner-up as"), strict=True):
        expect(shown.root.get_by_role("term").filter(has_text=term)).to_be_visible()
        shown.root.get_by_role("button", name=f"Copy {line}", exact=True).first.click()
        assert shown.page.evaluate("navigator.clipboard.readText()") == line


def test_the_way_that_the_step_takes_is_strong_up_to_its_answer(show: Stage):
    shown = show(predicted())
    strong = shown.root.locator(".jsm-found-path > li > .jsm-found-strong")
    assert strong.count() == 3
    expect(shown.root.locator(".jsm-found-strong > .jsm-found-leaf")).to_have_text(["fsdp"])
    expect(shown.root).to_contain_text("The usual path leads to fsdp; the search found fsdp+tp")


def test_what_was_not_compiled_is_folded_unless_nothing_was(show: Stage):
    for choice, is_open in ((predicted(), False), (planned(), True)):
        table = show(choice).root.locator(".jsm-found-others")
        assert table.is_visible() is is_open
    expect(table.get_by_role("row").filter(has_text="fsdp+tp")).to_contain_text("204\u202fms")


def test_python_reads_and_sets_which_trial_is_chosen():
    choice = measured()
    assert isinstance(choice.view, ChoiceView) and choice.view is choice.view
    assert choice.comparison.trials[choice.view.chosen] is choice.trial
    choice.view.other = "dp"
    assert choice.view.other == 0
