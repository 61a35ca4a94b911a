"""Parse a cell with the line numbers of the editor, and run the cell in the notebook's namespace."""

import ast
import io
import linecache
import tokenize
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ...code_locations import cell_name, cell_number, is_cell_file, line_text
from ...errors import ShardError
from .binding import Binding
from .injected_calls import InjectedCalls
from .loops import Feeds, LoopLengths, feed_loops, track_loops
from .names import in_scope

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_below_magics: dict[str, int] = {}  # numbers of cells run by a magic, by file name


@dataclass(frozen=True)
class Cell:
    """Parsed cell.

    Attributes:
        tree: Syntax tree.
        filename: File name in tracebacks.
        quiet: Whether the cell ends with a semicolon.
        text: Cell as shown in the editor.
    """

    tree: ast.Module
    filename: str
    quiet: bool
    text: str


def parse(shell: "InteractiveShell", source: str, magic: str = "") -> Cell:
    """Parse the code below a cell magic.

    Args:
        shell: Shell of the notebook; gives the cell's number to tracebacks.
        source: Code below the magic's line.
        magic: Line of the magic.

    Raises:
        SyntaxError: The code is not Python.
        ShardError: `await` outside a function, or another cell magic below.
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
    # IPython drops leading blank lines: with these and the magic's line put back, lines count as in the editor.
    text = "\n" * (1 + blank) + shell.transform_cell(source)
    filename = shell.compile.cache(text, shell.displayhook.prompt_count)
    _below_magics[filename] = shell.displayhook.prompt_count
    tree = shell.compile.ast_parse(text, filename)
    for node in in_scope(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            at = line_text(cell_name(shell.displayhook.prompt_count), node.lineno)
            raise ShardError(
                f"{at}: a %%shard cell can't await at its top level; "
                "await in a cell of its own, or inside an async function"
            )
    return Cell(shell.transform_ast(tree), filename, _ends_with_semicolon(text), f"{magic}\n{source}")


def execution_number(shell: "InteractiveShell", file: str) -> int | None:
    """Return the number of the cell with this file name; None if the file is no cell."""
    if hasattr(shell.compile, "format_code_name"):
        known = shell.compile.format_code_name(file)
        number = known[1].removeprefix("In[").removesuffix("]") if known else ""
        return int(number) if number.isdecimal() else None
    # IPython 7, as in Colab, has no cell numbers by file name.
    return cell_number(file) or _below_magics.get(file) or _number_by_text(shell, file)


def _number_by_text(shell: "InteractiveShell", file: str) -> int | None:
    """Return the number of the last cell run with the text of a cell's file."""
    if not is_cell_file(file) or shell.history_manager is None:
        return None
    text = "".join(linecache.getlines(file)).strip("\n")
    ran = enumerate(shell.history_manager.input_hist_raw)
    # History has the cells as typed, `linecache` as transformed by IPython.
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
    lengths: LoopLengths | None = None,
    feeds: Feeds | None = None,
) -> None:
    """Run the cell with the sharded step bound, and display the value of the last expression.

    Args:
        shell: Shell of the notebook.
        cell: Parsed cell.
        binding: Binding of the step, already entered.
        lengths: Receives the loops that call the step; None to track no loops.
        feeds: Prefetches the iterables of the innermost loops that call the step; None for no prefetching.

    Raises:
        ShardError: `feeds` is given and no loop calls the step.
    """
    constants = InjectedCalls()
    if feeds is not None and not feed_loops(cell.tree, binding.step, shell.user_ns, feeds, constants):
        raise ShardError(
            f"--feed: no for loop of the cell calls {binding.step.name}; write jaxshard_magic.feed(...) into the "
            "loop's header where it is, or leave it out"
        )
    if lengths is not None:
        track_loops(cell.tree, cell.filename, binding.step, shell.user_ns, lengths, constants)
    # A last expression is compiled apart, as its value is displayed.
    *statements, last = cell.tree.body or [ast.Pass()]
    if not isinstance(last, ast.Expr):
        statements, last = [*statements, last], None
    module = ast.Module(statements, [])
    if not binding.step.in_cell:
        binding.bind()
    binding.inject(module, constants)
    compiler: Any = shell.compile
    code = constants.insert_callables(compiler(ast.fix_missing_locations(module), cell.filename, "exec"))
    shown = last and constants.insert_callables(compiler(ast.Expression(last.value), cell.filename, "eval"))
    exec(code, shell.user_ns)
    value = eval(shown, shell.user_ns) if shown else None
    # The last expression may have bound the step unseen.
    if not binding.step.inside:
        binding.bind()
    if value is not None and not cell.quiet:
        display(value)
