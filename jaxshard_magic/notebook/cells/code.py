"""A cell as code: parsed with the lines its editor shows, and run in the notebook's namespace."""

import ast
import io
import linecache
import tokenize
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ...cell_files import is_cell_file, number_in
from ...errors import ShardError
from ...places import cell_name, in_words
from .binding import Binding
from .constants import Constants
from .fed import Feeds, feed_loops
from .lengths import Lengths
from .loops import follow_loops
from .names import in_scope

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_below_magics: dict[str, int] = {}  # the numbers of cells that a magic ran, by what Python calls them


@dataclass(frozen=True)
class Cell:
    """A parsed cell; `quiet` when it ends with a semicolon. `text` is the cell as its editor shows it."""

    tree: ast.Module
    filename: str
    quiet: bool
    text: str


def parse(shell: "InteractiveShell", source: str, magic: str = "") -> Cell:
    """The cell below the `magic`'s line, known to tracebacks by its number in the notebook.

    Raises SyntaxError, and ShardError for an await outside a function and for another cell magic below.
    """
    lines = source.splitlines()
    if (first := next((line.strip() for line in lines if line.strip()), "")).startswith("%%"):
        name = first.split()[0]
        raise ShardError(
            f"{name} below %%shard takes the rest of the cell as text, and no step is found in it: write {name} above, "
            "as the cell's first line",
            fix=name,
        )
    blank = next((at for at, line in enumerate(lines) if line.strip()), len(lines))
    # IPython drops leading blank lines; with them and the magic's own, lines count as the editor's do.
    text = "\n" * (1 + blank) + shell.transform_cell(source)
    filename = shell.compile.cache(text, shell.displayhook.prompt_count)
    _below_magics[filename] = shell.displayhook.prompt_count
    tree = shell.compile.ast_parse(text, filename)
    for node in in_scope(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            at = in_words(cell_name(shell.displayhook.prompt_count), node.lineno)
            raise ShardError(
                f"{at}: a %%shard cell can't await at its top level; "
                "await in a cell of its own, or inside an async function"
            )
    return Cell(shell.transform_ast(tree), filename, _ends_with_semicolon(text), f"{magic}\n{source}")


def number_of(shell: "InteractiveShell", file: str) -> int | None:
    """The number of the cell that Python knows by a file's name; None for what is no cell."""
    if hasattr(shell.compile, "format_code_name"):
        known = shell.compile.format_code_name(file)
        number = known[1].removeprefix("In[").removesuffix("]") if known else ""
        return int(number) if number.isdecimal() else None
    # IPython 7, which Colab has, keeps no numbers
    return number_in(file) or _below_magics.get(file) or _number_by_text(shell, file)


def _number_by_text(shell: "InteractiveShell", file: str) -> int | None:
    """The number of the last cell that ran with the text of a cell's file."""
    if not is_cell_file(file) or shell.history_manager is None:
        return None
    text = "".join(linecache.getlines(file)).strip("\n")
    ran = enumerate(shell.history_manager.input_hist_raw)
    return max((n for n, cell in ran if _python(shell, cell).strip("\n") == text), default=None)


@lru_cache(maxsize=10_000)
def _python(shell: "InteractiveShell", cell: str) -> str:
    return shell.transform_cell(cell)


def _ends_with_semicolon(text: str) -> bool:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    layout = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER)
    said = [token.string for token in tokens if token.type not in layout]
    return said[-1:] == [";"]


def run(
    shell: "InteractiveShell",
    cell: Cell,
    binding: Binding,
    lengths: Lengths | None = None,
    feeds: Feeds | None = None,
) -> None:
    """Run the cell with the sharded step bound in place, and display the value of its last expression.

    `lengths` are told of the loops that call the step; `feeds` takes ahead what the innermost of them iterate over.
    Raises ShardError where there is no loop to feed.
    """
    constants = Constants()
    if feeds is not None and not feed_loops(cell.tree, binding.step, shell.user_ns, feeds, constants):
        raise ShardError(
            f"--feed: no for loop of the cell calls {binding.step.name}; write jaxshard_magic.feed(...) into the "
            "loop's header where it is, or leave it out"
        )
    if lengths is not None:
        follow_loops(cell.tree, cell.filename, binding.step, shell.user_ns, lengths, constants)
    *statements, last = cell.tree.body or [ast.Pass()]
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], None
    module = ast.Module(statements, [])
    if not binding.step.here:
        binding.bind()
    binding.into(module, constants)
    compiler: Any = shell.compile
    code = constants.complete(compiler(ast.fix_missing_locations(module), cell.filename, "exec"))
    shown = last and constants.complete(compiler(ast.Expression(last.value), cell.filename, "eval"))
    exec(code, shell.user_ns)
    value = eval(shown, shell.user_ns) if shown else None
    if not binding.step.inside:
        binding.bind()
    if value is not None and not cell.quiet:
        display(value)
