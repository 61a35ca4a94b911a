"""The standalone document around a fragment: type, spacing and colours for light and dark."""

from collections.abc import Callable, Mapping
from html import escape

from jaxshard_magic.views.colours import DARK, LIGHT, ROLES, SPENT
from jaxshard_magic.views.hues import HUES

_RULES = """
body{margin:0;padding:16px;background:var(--bg);color:var(--ink);
font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
.jss{max-width:868px;margin:0 auto}
p{margin:8px 0;overflow-wrap:anywhere}
.jss-verdict{font-size:15px}
.jss-value{font-size:17px}
small{font-size:11.5px;color:var(--ink-2)}
code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
table{border-collapse:collapse;font-size:12px;margin:8px 0}
th,td{padding:4px 16px 4px 0;border-bottom:1px solid var(--line)}
th{font-weight:400;color:var(--ink-2);font-size:11.5px}
th:last-child,td:last-child{padding-right:0}
th{vertical-align:bottom}
tr.jss-figures td{border-bottom:0;padding-bottom:0}
details{margin:16px 0}
summary{cursor:pointer;margin-bottom:4px}
svg{vertical-align:middle}
"""


def colour_rules(colour: Callable[[str], str]) -> str:
    """What the classes of drawings and texts are painted with; `colour` gives one by its name in `views.colours`."""
    axes = "".join(
        f".jss b.jss-a{i}{{color:{colour(f'a{i}')}}}.jss-s{i}{{stroke:{colour(f'a{i}')}}}"
        f".jss-f{i}{{fill:{colour(f'a{i}')}}}"
        for i in range(HUES)
    )
    roles = "".join(f".jss-r-{r}{{fill:{colour(r)}}}" for r in ROLES)
    spent = "".join(f".jss-k-{kind}{{fill:{colour(kind)}}}" for kind in SPENT)
    levels = "".join(f".jss-{level}{{color:{colour(level)}}}" for level in ("warning", "error", "ok", "info"))
    return f"{axes}\n{roles}\n{spent}\n{levels}\n.jss-limit{{fill:{colour('error')}}}"


def _variables(theme: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in theme.items())


def document(title: str, body: str) -> str:
    """A whole HTML document with no script and nothing fetched."""
    style = (
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([theme=light]){{{_variables(DARK)}}}}}\n"
        f":root[theme=light]{{color-scheme:light}}:root[theme=dark]{{color-scheme:dark;{_variables(DARK)}}}"
        f"{_RULES}{colour_rules('var(--{})'.format)}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>{_BODY}{body}{_END}"
    )


_BODY, _END = "</head><body>\n", "</body></html>\n"


def with_more(made: str, head: str, body: Callable[[str], str]) -> str:
    """What `document` made, with `head` at the end of its head, and with what `body` makes of its body."""
    above, _, rest = made.partition(_BODY)
    return f"{above}{head}{_BODY}{body(rest.removesuffix(_END))}{_END}"


def embedded(dark: str) -> str:
    """The styles of fragments in a page of another look, such as the book's, which is dark where the selector `dark`
    matches."""
    own = f"color:var(--ink);font-size:13px;font-variant-numeric:tabular-nums;{_RULES}"
    colours = colour_rules("var(--{})".format)
    return f".jss{{{_variables(LIGHT)}}}\n{dark} .jss{{{_variables(DARK)}}}\n.jss{{{own}}}\n{colours}\n"
