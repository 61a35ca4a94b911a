"""Export of pictures to files, and of widgets to self-contained HTML pages."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from jaxshard_magic.display import renderer
from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.report.records import Displayable, writable_path, write_file

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
ENDINGS = (".svg", ".png")
Picture = Callable[[Theme], str]  # returns an SVG document


@dataclass(frozen=True)
class PageWidget:
    """A widget embedded in a page.

    Attributes:
        bundle: Name of the JavaScript bundle in `static/`.
        data: Payload unpacked by the bundle.
        state: Initial selection.
        pictures: Pictures the widget can save, by name.
        title: Heading on a page with several widgets.
    """

    bundle: str
    data: bytes
    state: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    title: str = ""


class HasPictures:
    """Base of classes with pictures to save."""

    def _pictures(self) -> Mapping[str, Picture]:
        """Return the available pictures by name; pictures without data are left out."""
        return renderer(self, "pictures")(self)

    def save(self, path: str | os.PathLike[str], picture: str | None = None, *, theme: Theme = "light") -> Path:
        """Write a picture to a file and overwrite an existing one: `report.save("layout.svg")`.

        PNG needs the package resvg-py.

        Args:
            path: The file; it ends in `.svg` or `.png`.
            picture: Name of the picture; by default the name of the file: `figures/memory.png` is the picture `memory`.
            theme: "light" or "dark".

        Returns:
            The path.

        Raises:
            ShardError: No such picture, or the file can't be written.
        """
        given = Path(os.path.expanduser(os.fspath(path)))
        ending = given.suffix.lower()
        if ending not in ENDINGS:
            said = f"ends in {given.suffix}" if ending else "has no ending"
            raise ShardError(f"{os.fspath(path)} {said}; a picture is saved as {' or '.join(ENDINGS)}")
        text = self.drawn(given.stem if picture is None else picture, theme)
        if ending == ".svg":
            return write_file(path, text)
        # An unwritable path should fail before the slow conversion to PNG.
        writable_path(path)
        return write_file(path, renderer(self, "png")(text))

    def drawn(self, picture: str, theme: Theme = "light") -> str:
        """Return a picture as an SVG document.

        Args:
            picture: Name of the picture.
            theme: "light" or "dark".

        Raises:
            ShardError: No such picture or theme.
        """
        pictures = self._pictures()
        if theme not in THEMES:
            raise ShardError(unknown_name(f"no theme '{theme}'", theme, THEMES, f"the themes are {list_names(THEMES)}"))
        if picture not in pictures:
            there = f"the pictures are {list_names(pictures)}" if pictures else "there is nothing to draw"
            raise ShardError(unknown_name(f"no picture '{picture}' here", picture, pictures, there))
        return pictures[picture](theme)


class Exportable(Displayable, HasPictures):
    """Base of classes with a widget that also works on a page without a notebook."""

    def _page_widgets(self) -> Sequence[PageWidget]:
        """Return the widgets. A widget without a title replaces the HTML without script; others follow below."""
        return renderer(self, "page_widgets")(self)

    @overload
    def to_html(self, path: None = None, *, interactive: bool = False) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str], *, interactive: bool = False) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None, *, interactive: bool = False) -> str | Path:
        """Return HTML: a fragment to embed, or a complete document written to `path`, over an existing file.

        Args:
            path: The file; `~` is the home folder.
            interactive: False: no script. True: always a complete document with the widget. It needs no network and no
                kernel, and shows the HTML without script if scripts are disabled.

        Returns:
            The HTML, or the path of the file.

        Raises:
            ShardError: The file can't be written.
        """
        if not interactive:
            return super().to_html(path)
        text = renderer(self, "interactive_page")(renderer(self, "page")(self), self._page_widgets())
        return text if path is None else write_file(path, text)
