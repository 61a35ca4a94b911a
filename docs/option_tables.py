"""Tables of the book that are read from the package itself, so that they say what it does.

    ```{options} Options
    ```

is a table of the options of a command line, by the name of its class in `jaxshard_magic.notebook.options`;
`{settings}` is one of what `%config ShardSession` sets.
"""

from collections.abc import Sequence

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jaxshard_magic.notebook import options
from jaxshard_magic.notebook.session import ShardSession

Row = tuple[str, str]  # code, then plain text


def option_rows(line: str) -> list[Row]:
    """What may be typed in a command line, and what it does."""
    flags = getattr(options, line).flags()
    return [(f"{flag.name} {flag.metavar}".strip(), flag.help) for flag in flags]


def setting_rows() -> list[Row]:
    """What `%config ShardSession` sets, with the value that it has until then."""
    traits = ShardSession.class_traits(config=True)
    own = {name: trait for name, trait in traits.items() if name in ShardSession.class_own_traits()}
    return [(f"{name} = {trait.default_value!r}", trait.help) for name, trait in own.items()]


def table(rows: Sequence[Row], heads: Row) -> nodes.table:
    """The rows as a table of two columns."""
    group = nodes.tgroup(cols=2)
    group += [nodes.colspec(colwidth=width) for width in (1, 2)]
    group += nodes.thead("", _row(*(nodes.Text(head) for head in heads)))
    group += nodes.tbody("", *(_row(nodes.literal(code, code), nodes.Text(said)) for code, said in rows))
    return nodes.table("", group)


def _row(*cells: nodes.Node) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


class Options(SphinxDirective):
    """The options of one command line."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [table(option_rows(self.arguments[0]), ("option", "what it does"))]


class Settings(SphinxDirective):
    """What `%config ShardSession` sets."""

    def run(self) -> list[nodes.Node]:
        return [table(setting_rows(), ("setting, as it is", "what it does"))]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("options", Options)
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
