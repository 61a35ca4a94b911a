"""What can be sent to somebody: pictures as files of their own, and a page with the widget itself."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from jaxshard_magic.errors import ShardError, none_of, one_of
from jaxshard_magic.report.written import Shown, place_for, saved

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
ENDINGS = (".svg", ".png")
Picture = Callable[[Theme], str]  # an SVG document


@dataclass(frozen=True)
class PageWidget:
    """A widget as a page draws it: `bundle` of `static/`, the payload that it unpacks and what its reader finds chosen.

    `pictures`: what it can save, by name. `title`: what it is headed by where a page has several.
    """

    bundle: str
    data: bytes
    state: Mapping[str, Any] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    title: str = ""


class Pictured(ABC):
    """A class of it has pictures to save."""

    @abstractmethod
    def _pictures(self) -> Mapping[str, Picture]:
        """Its pictures by name; those alone that it has something for."""

    def save(
        self, path: str | os.PathLike[str], picture: str | None = None, *, theme: Theme = "light"
    ) -> Path:
        """Write one of its pictures to a file, over one that is there: `report.save("layout.svg")`.

        Args:
            path: where to; it ends in `.svg` or `.png`.
            picture: which one; by default the file's name says it: `figures/memory.png` is the one of memory.
            theme: "light" or "dark".

        Returns the path. PNG takes the package resvg-py. Raises ShardError for a picture that this has not, and where
        the file can't be written.
        """
        given = Path(os.path.expanduser(os.fspath(path)))
        ending = given.suffix.lower()
        if ending not in ENDINGS:
            said = f"ends in {given.suffix}" if ending else "has no ending"
            raise ShardError(f"{os.fspath(path)} {said}; a picture is saved as {' or '.join(ENDINGS)}")
        text = self.drawn(given.stem if picture is None else picture, theme)
        if ending == ".svg":
            return saved(path, text)
        from jaxshard_magic.views.pictures.png import png

        place_for(path)  # told before the work is done
        return saved(path, png(text))

    def drawn(self, picture: str, theme: Theme = "light") -> str:
        """The picture of this name as an SVG document. Raises ShardError for a name that this has none of."""
        pictures = self._pictures()
        if theme not in THEMES:
            raise ShardError(
                none_of(f"no theme '{theme}'", theme, THEMES, f"the themes are {one_of(THEMES)}")
            )
        if picture not in pictures:
            there = f"the pictures are {one_of(pictures)}" if pictures else "there is nothing to draw"
            raise ShardError(none_of(f"no picture '{picture}' here", picture, pictures, there))
        return pictures[picture](theme)


class Sendable(Shown, Pictured):
    """A class of it has a widget, which a page of its own shows without a notebook."""

    @abstractmethod
    def _live(self) -> Sequence[PageWidget]:
        """Its widgets. One without a title stands in the place of the HTML without script, others below it."""

    @overload
    def to_html(self, path: None = None, *, interactive: bool = False) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str], *, interactive: bool = False) -> Path: ...

    def to_html(self, path: str | os.PathLike[str] | None = None, *, interactive: bool = False) -> str | Path:
        """As HTML: a fragment to embed, or a whole document written to `path`, over one that is there.

        Args:
            path: where to; `~` is the home folder.
            interactive: False: no script. True: always a whole document, with the widget itself; it needs no network
                and no kernel, and shows the HTML without script where scripts are off.

        Returns the HTML, or the path that was written. Raises ShardError where it can't be.
        """
        if not interactive:
            return super().to_html(path)
        from jaxshard_magic.views import interactive as views

        text = views.with_widgets(self._ways()[2](self), self._live())
        return text if path is None else saved(path, text)
