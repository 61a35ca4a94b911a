"""The committed bundles: made from the sources that lie beside them, small, and nothing but our own code."""

import json
import re
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDGETS, STATIC = ROOT / "widgets", ROOT / "jaxshard_magic" / "static"
BUNDLES = {
    "report.js": 177_000,
    "compare.js": 57_000,
    "explore.js": 96_000,
    "live.js": 18_000,
    "stop.js": 2_000,
    "loader.js": 4_000,
    "page.js": 4_000,
}
"""The most bytes that each may have: `loader.js` travels with every view, `stop.js` with every button, `page.js` with
every document that has a widget in it, the others once a page."""


def sources() -> dict[str, str]:
    """What a bundle is made from, by its path under `widgets/`."""
    found = [path for end in ("js", "mjs", "css") for path in WIDGETS.rglob(f"*.{end}")]
    names = sorted(path.relative_to(WIDGETS).as_posix() for path in found)
    ours = [name for name in names if not name.startswith("node_modules/")]
    return {name: (WIDGETS / name).read_text(encoding="utf-8") for name in ours}


def source_hash() -> str:
    """The same as in `widgets/build.mjs`."""
    said = sha256()
    for name, text in sources().items():
        said.update(f"{name}\0{text}\0".encode())
    return said.hexdigest()[:16]


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_is_made_from_the_sources_beside_it(name: str):
    banner = (STATIC / name).read_text(encoding="utf-8").partition("\n")[0]
    fresh = f"// Built from widgets/, sources {source_hash()}: do not edit."
    assert banner == fresh, "the bundle is stale: cd widgets && npm ci && npm run build"


@pytest.mark.parametrize("name", BUNDLES)
def test_a_bundle_is_small_and_holds_nobody_elses_code(name: str):
    text = (STATIC / name).read_text(encoding="utf-8")
    assert len(text.encode()) < BUNDLES[name]
    assert "node_modules" not in text
    assert not re.search(r"(?<![\w.$])(?:import|require)\s*\(?\s*[\"']", text), "a bundle imports nothing"
    assert "sourceMappingURL" not in text


def test_what_stands_in_a_document_as_it_is_does_not_end_its_script():
    assert "</script" not in (STATIC / "page.js").read_text(encoding="utf-8").lower()


def test_there_are_no_other_bundles():
    assert {path.name for path in STATIC.iterdir()} == set(BUNDLES)


def test_a_widget_depends_on_nothing_but_tools_of_fixed_versions():
    package = json.loads((WIDGETS / "package.json").read_text())
    assert "dependencies" not in package
    assert set(package["devDependencies"]) == {"@biomejs/biome", "esbuild", "typescript"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in package["devDependencies"].values())


def test_the_tools_come_from_the_public_registry():
    packages = json.loads((WIDGETS / "package-lock.json").read_text())["packages"]
    places = {package["resolved"] for package in packages.values() if "resolved" in package}
    assert all(place.startswith("https://registry.npmjs.org/") for place in places)


def test_text_never_becomes_markup():
    """Names come from a person's code: they reach the page as text nodes and attributes alone."""
    sinks = r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|eval|new Function)\b"
    found = {name: set(re.findall(sinks, text)) for name, text in sources().items()}
    assert {name: sorted(words) for name, words in found.items() if words} == {}


def test_no_class_is_styled_by_two_views():
    styled: dict[str, set[str]] = defaultdict(set)
    for name, text in sources().items():
        if name.endswith(".css"):
            for made in re.findall(r"^\.(jsm-[\w-]+) \{", text, re.MULTILINE):
                styled[made].add(name)
    assert {made: names for made, names in styled.items() if len(names) > 1} == {}
