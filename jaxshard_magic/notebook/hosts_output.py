"""Output of hosts, displayed in the kernel: of host 0 as it arrives, of another host only if different."""

import re
import sys
from collections.abc import Callable
from html import escape
from typing import Any

from IPython.display import display

# Differs between hosts in any case: the process id in a cell's path, and addresses in a repr.
_PROCESS = re.compile(r"(?<=ipykernel_)\d+|(?<= at 0x)[0-9a-f]+")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TOLD = ("HostFailed", "Interrupted", "KeyboardInterrupt", "ShardError")  # shown in one line at the end of the cell
MOST = 20_000  # characters shown of another host's output


class HostValue:
    """Value of host 0's cell by its displayed form; becomes the kernel's `Out` of the cell.

    Args:
        data: Representations by MIME type.
        metadata: Metadata by MIME type.
    """

    def __init__(self, data: dict[str, Any], metadata: dict[str, Any]):
        self._data, self._metadata = data, metadata

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._data, self._metadata

    def __repr__(self) -> str:
        return str(self._data.get("text/plain", ""))


class HostsOutput:
    """Output of one cell on all hosts.

    Args:
        shell: IPython's shell.
        hosts: Number of hosts.
        received: Called with the kind and data of a package object displayed by host 0; returns the object to display
            in the kernel, or None.
        prints: Show printed text.

    Attributes:
        value: Value of host 0's cell; None without one.
        after_error: Objects that arrived after an exception of the cell, to be displayed below the line about the
            exception.
    """

    def __init__(self, shell: Any, hosts: int, received: Callable[[str, Any], Any], prints: bool = True):
        self._shell, self._received, self._prints = shell, received, prints
        self._said = [""] * hosts
        self._errors: dict[int, list[str]] = {}
        self.value: Any = None
        self.after_error: list[Any] = []

    def handle_message(self, host: int, message: dict[str, Any]) -> None:
        """Process one message of a host, in the order of sending.

        Args:
            host: Number of the host.
            message: Message of the Jupyter protocol.
        """
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

    def show_differences(self) -> None:
        """Display the text of each host different from host 0's, folded."""
        first = _compared(self._said[0])
        for host, text in enumerate(map(_settled, self._said)):
            if host and text and _compared(self._said[host]) != first:
                text = text if len(text) <= MOST else f"{text[:MOST]}\n..."
                html = f"<details><summary>host {host}</summary><pre>{escape(_COLOURS.sub('', text))}</pre></details>"
                plain = "".join(f"host {host}: {line}\n" for line in text.splitlines())
                display({"text/plain": plain.rstrip("\n"), "text/html": html}, raw=True)

    def print_traceback(self, host: int) -> None:
        """Print the traceback of a host whose own exception ended the cell."""
        if host in self._errors:
            print("\n".join(self._errors[host]), file=sys.stderr)

    def _show(self, kind: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Display one message of host 0."""
        if kind == "stream":
            stream = sys.stderr if content["name"] == "stderr" else sys.stdout
            stream.write(content["text"])
            stream.flush()
        elif kind in ("display_data", "update_display_data"):
            from ..views.show import DATA

            if (ours := content["data"].get(DATA)) is not None:
                shown = self._received(ours["kind"], ours["data"])
                # IPython prints the line about the exception after all output; the object has to come below.
                if shown is not None and 0 in self._errors:
                    self.after_error.append(shown)
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
            self.value = HostValue(content["data"], content.get("metadata", {}))
        elif kind == "clear_output":
            self._shell.display_pub.clear_output(wait=content.get("wait", False))
        elif kind == "error" and content.get("ename") not in _TOLD:
            print("\n".join(content["traceback"]), file=sys.stderr)


def _settled(text: str) -> str:
    """Return text as a terminal shows it in the end: a carriage return overwrites the line before it."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _compared(text: str) -> list[str]:
    """Return the lines of a host's output to compare with another host's, without process ids and addresses.

    Overwritten lines are left out: progress bars differ in speed.
    """
    return [_PROCESS.sub("", line) for line in text.split("\n") if "\r" not in line.rstrip("\r")]
