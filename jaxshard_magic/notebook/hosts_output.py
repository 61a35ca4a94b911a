"""What hosts publish while a cell runs, shown in the kernel: host 0's as it comes, another's where it differs."""

import re
import sys
from collections.abc import Callable
from html import escape
from typing import Any

from IPython.display import display

_PROCESS = re.compile(
    r"(?<=ipykernel_)\d+|(?<= at 0x)[0-9a-f]+"
)  # by which hosts differ: in the path of a cell, in a repr
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TOLD = (
    "HostFailed",
    "Interrupted",
    "KeyboardInterrupt",
    "ShardError",
)  # in one line, at the end of the cell
MOST = 20_000  # characters of another host's output that are shown


class Value:
    """What host 0's cell has as its value, as it looks: the kernel's `Out` of that cell."""

    def __init__(self, data: dict[str, Any], metadata: dict[str, Any]):
        self._data, self._metadata = data, metadata

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._data, self._metadata

    def __repr__(self) -> str:
        return str(self._data.get("text/plain", ""))


class Output:
    """One cell's output. `received(kind, data)` is given what host 0 shows of ours, and gives what is shown for it;
    what comes after an error of the cell is `late`, to be shown below the line that tells of it. `prints`: whether what
    is printed is shown."""

    def __init__(self, shell: Any, hosts: int, received: Callable[[str, Any], Any], prints: bool = True):
        self._shell, self._received, self._prints = shell, received, prints
        self._said = [""] * hosts
        self._errors: dict[int, list[str]] = {}
        self.value: Any = None
        self.late: list[Any] = []

    def publish(self, host: int, message: dict[str, Any]) -> None:
        """Take one message, in the order in which a host sent them."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream" and not self._prints:
            return
        if kind == "stream":
            self._said[host] += content["text"]
        elif kind == "execute_result":
            self._said[host] += content["data"].get("text/plain", "") + "\n"
        elif kind == "error":
            self._errors[host] = content["traceback"]
        if host == 0:
            self._show(kind, content, message.get("metadata", {}))

    def others(self) -> None:
        """Show what other hosts said that host 0 did not, each folded."""
        first = _compared(self._said[0])
        for host, text in enumerate(map(_settled, self._said)):
            if host and text and _compared(self._said[host]) != first:
                text = text if len(text) <= MOST else f"{text[:MOST]}\n..."
                html = (
                    f"<details><summary>host {host}</summary>"
                    f"<pre>{escape(_COLOURS.sub('', text))}</pre></details>"
                )
                plain = "".join(f"host {host}: {line}\n" for line in text.splitlines())
                display({"text/plain": plain.rstrip("\n"), "text/html": html}, raw=True)

    def error_of(self, host: int) -> None:
        """Show the traceback of a host, whose own error ended the cell."""
        if host in self._errors:
            print("\n".join(self._errors[host]), file=sys.stderr)

    def _show(self, kind: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        if kind == "stream":
            stream = sys.stderr if content["name"] == "stderr" else sys.stdout
            stream.write(content["text"])
            stream.flush()
        elif kind in ("display_data", "update_display_data"):
            from ..views.show import DATA

            if (ours := content["data"].get(DATA)) is not None:
                shown = self._received(ours["kind"], ours["data"])
                if shown is not None and 0 in self._errors:
                    self.late.append(shown)
                elif shown is not None:
                    display(shown)
                return
            self._shell.display_pub.publish(
                data=content["data"],
                metadata=content.get("metadata", {}),
                transient=content.get("transient", {}),
                update=kind == "update_display_data",
            )
        elif kind == "execute_result":
            self.value = Value(content["data"], content.get("metadata", {}))
        elif kind == "clear_output":
            self._shell.display_pub.clear_output(wait=content.get("wait", False))
        elif kind == "error" and content.get("ename") not in _TOLD:
            print("\n".join(content["traceback"]), file=sys.stderr)


def _settled(text: str) -> str:
    """Text as a terminal has it in the end: what stands before a carriage return is written over."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _compared(text: str) -> list[str]:
    """What of a host's output is held against another's: not the lines that were written over, as a progress bar's
    are, whose speed differs, nor which process it is."""
    return [_PROCESS.sub("", line) for line in text.split("\n") if "\r" not in line.rstrip("\r")]
