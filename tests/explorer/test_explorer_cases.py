"""Python and the browser work layouts and lines out alike: one table of cases for both."""

import pytest
from support.browsing import Stage
from support.explorer_cases import CASES, IN_PYTHON, IN_THE_BROWSER

from jaxshard_magic.notebook.options import parse, with_strategy
from jaxshard_magic.specs import match_rules, parse_assignment


def test_every_kind_is_in_the_table():
    assert set(CASES) == set(IN_PYTHON) == set(IN_THE_BROWSER)


@pytest.mark.parametrize("kind", IN_PYTHON)
def test_python_works_it_out_as_the_table_says(kind: str):
    for *given, said in CASES[kind]:
        assert IN_PYTHON[kind](*given) == said, given


@pytest.mark.parametrize("kind", IN_THE_BROWSER)
def test_the_browser_works_it_out_as_the_table_says(kind: str, show: Stage):
    each = f"cases.map(given => ({IN_THE_BROWSER[kind]})(...given))"
    code = f"cases => {{ const {{ cuts, line }} = explore; return {each}; }}"
    found = show.page.evaluate(code, [given for *given, _ in CASES[kind]])
    assert found == [said for *_, said in CASES[kind]]


def test_a_rules_expression_finds_the_array_and_none_that_lies_otherwise():
    for path, paths, alike, expression in CASES["pattern"]:
        rule, spec = parse_assignment(f"{expression}=P('data')")
        found = {p for p in paths if match_rules([(rule, spec)], p)}
        assert path in found and found <= {path, *alike}


def test_a_line_is_one_that_the_magic_reads():
    for own, strategy, _, rules, specs, said in CASES["line"]:
        options = with_strategy(parse(said.removeprefix("%%shard ")))
        assert options.strategy == strategy
        assert len(options.rules) >= len(rules) and len(options.specs) == len(specs)
        assert options.step_options.get("remat") == ("full" if own["kept"] else None)
