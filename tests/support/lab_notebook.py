"""A notebook in a real JupyterLab, worked in as a person does."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from support.lab_server import Lab, lab, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request, WebSocket

NAME = "report.ipynb"
MODULE = b'"digest": "'  # only the shared module's state has it


@dataclass
class Notebook:
    """The notebook in the browser, and what its kernel sent."""

    page: "Page"
    server: Lab
    received: list[bytes] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def hear(self, frame: bytes | str) -> None:
        self.received.append(frame.encode() if isinstance(frame, str) else frame)

    def note(self, request: "Request") -> None:
        if not request.url.startswith((self.server.url, "blob:", "data:")):
            self.outside.append(request.url)

    def open(self) -> None:
        self.page.goto(f"{self.server.url}/lab/tree/{NAME}?token={self.server.token}&reset")
        until(self.server.ready, "a kernel with a page connected to it")

    def do(self, command: str, **given: Any) -> None:
        """One of JupyterLab's own commands, as its menus run it."""
        self.page.evaluate("([command, given]) => jupyterapp.commands.execute(command, given)", [command, given])

    def begin(self, cell: int) -> None:
        """Run one cell, and do not wait for it."""
        self.cell(cell).locator(".jp-InputPrompt").click()
        self.page.evaluate("() => void jupyterapp.commands.execute('notebook:run-cell')")

    def ended(self, cell: int, before: str = "") -> None:
        """Wait until a cell has a number, another one than `before`."""
        said = self.cell(cell).locator(".jp-InputPrompt")
        until(lambda: re.fullmatch(r"\[\d+\]:", now := said.inner_text()) and now != before, f"cell {cell}")

    def run(self, cell: int) -> None:
        """Run one cell and wait for its number."""
        before = self.cell(cell).locator(".jp-InputPrompt").inner_text()
        self.begin(cell)
        self.ended(cell, before)

    def cell(self, cell: int) -> "Locator":
        return self.page.locator(".jp-CodeCell").nth(cell)

    def outputs(self, cell: int) -> "Locator":
        return self.page.locator(".jp-CodeCell").nth(cell).locator(".jp-OutputArea-output")

    def widget(self, cell: int) -> "Locator":
        return self.page.locator(".jp-CodeCell").nth(cell).locator(".jsm[data-theme]")

    def twin(self, cell: int) -> "Locator":
        return self.page.locator(".jp-CodeCell").nth(cell).locator("[class*=jsm-static-]")

    def saved(self) -> Path:
        """The notebook's file, saved with the report in it."""
        file = self.server.root / NAME
        self.do("docmanager:save")
        until(lambda: "jsm-static-" in file.read_text(encoding="utf-8"), "the notebook to be saved")
        return file

    def sent(self) -> tuple[int, int]:
        """How often the views' module was sent so far, and all bytes."""
        return sum(MODULE in frame for frame in self.received), sum(map(len, self.received))


@contextmanager
def opened(browser: "Browser", folder: Path, cells: Sequence[str]) -> Iterator[Notebook]:
    """JupyterLab with a notebook of these cells open in it, none of them run."""
    with lab(folder) as server:
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(made, server.root / NAME)
        page = browser.new_page(viewport={"width": 1300, "height": 1800})
        page.set_default_timeout(60_000)
        notebook = Notebook(page, server)

        def listen(socket: "WebSocket") -> None:
            socket.on("framereceived", notebook.hear)

        page.on("websocket", listen)
        page.on("request", notebook.note)
        notebook.open()
        yield notebook
        page.close()
