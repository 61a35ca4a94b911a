"""The figures that views tell, by the quantity that each stands for, read out of what they say."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from html import unescape
from typing import Any

from jaxshard_magic.views.format import byte_text

Told = Mapping[str, set[str]]  # by quantity, each as it was written

_N = r"(?:\d[\d,]*(?:\.\d+)?)"
BYTES, TIME, SHARE = rf"{_N} [KMGTP]?i?B\b", rf"(?:≥|>=)?{_N} (?:us|ms|s)\b", rf"{_N}%"
# `5.09 of 15.75 GiB` tells its unit once
OF = rf"(?P<held>{_N})(?: (?P<own>[KMGTP]?i?B))? of (?P<limit>{_N}) (?P<unit>[KMGTP]?i?B)"
VERDICT = r"(?:Fits|Would fit|Does not fit|No memory limit here): "

# Where each quantity stands in words, the figure in the first group.
QUANTITIES = {
    "peak": [
        rf"{VERDICT}({BYTES})(?! too much)",
        rf"peak memory, (?:computed|measured) ({BYTES})",
        rf"(?m)^peak +({BYTES})",
        rf"\bMemory ({BYTES})(?= Communication|$)",
        rf"fullest, ({BYTES})",
        rf"all \d+ devices are alike at ({BYTES})",
        rf"peak of ({BYTES}) counts",
        rf"as it is ({BYTES})",
    ],
    "too much": [rf"({BYTES}) too much"],
    "sent": [
        rf"({BYTES}) sent\b",
        rf"sent per device and step ({BYTES})",
        rf"(?m)^sent +({BYTES})",
        rf"as it is {BYTES} {_N} [kMGTPE] ({BYTES})",
    ],
    "measured step": [
        rf"step time, measured ({TIME})",
        rf"step time, on this CPU ({TIME})",
        rf"(?m)^step +({TIME})",
        rf"Timing: ({TIME}) a step",
        rf"Step time is of this CPU \(({TIME})\)",
    ],
    "predicted step": [
        rf"\bpredicted ({TIME}) a step",
        rf"in (?:\S+ )?calls?, predicted ({TIME})",
        rf"(?:not run|not timed|one call), predicted ({TIME})",
        rf"Predicted step,? (?:of )?({TIME})",
        rf"communication: {TIME} of ({TIME})(?:,| on)",
    ],
    "communication": [rf"communication: ({TIME}) of {TIME}(?:,| on)"],
    "share of communication": [
        rf"\bCommunication ({SHARE})",
        rf"Communication: ({SHARE}) of the predicted",
        rf"({SHARE}) of the predicted step is communication",
    ],
    "compile time": [rf"compile time ({TIME})", rf"(?m)^compile +({TIME})", rf"20 20 ({TIME}) Check"],
    "bubble": [rf"\b[Bb]ubble ({SHARE})(?: measured)?", rf"Pipeline bubble ({SHARE})"],
    "pipeline's actions": [rf"its actions alone ({TIME})", rf"measured end ({TIME})"],
    "params": [rf"(?<!\S)params ({BYTES})"],
    "optimizer": [rf"(?<!\S)optimizer ({BYTES})"],
    "batch": [rf"(?<!\S)batch ({BYTES})"],
    "temporaries": [rf"(?<!\S)temporaries ({BYTES})"],
}


def plain(text: str) -> str:
    """With the spaces, the minus and the quotes of a keyboard, runs of spaces as one; lines stay."""
    text = re.sub("[\u202f\u00a0]", " ", text).replace("\u2212", "-")
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def of_html(html: str) -> str:
    """What a reader of the page reads, in one line."""
    return " ".join(plain(unescape(re.sub(r"<[^>]+>", " ", html))).split())


def of_markdown(markdown: str) -> str:
    """What a reader of the Markdown reads, a line for each of its lines."""
    return plain(re.sub(r"\\(?=[!-/:-@[-`{-~])", "", re.sub(r"(?<!\\)[|*`#]", " ", markdown)))


def told(text: str) -> Told:
    """The figures of `text`, which is `plain`, by quantity; a limit wherever one stands."""
    found: dict[str, set[str]] = defaultdict(set)
    found["limit"] = {f"{m['limit']} {m['unit']}" for m in re.finditer(OF, text)}
    found["limit"] |= set(re.findall(rf"limit ({BYTES})", text))
    whole = re.sub(OF, lambda m: f"{m['held']} {m['own'] or m['unit']}", text)
    for quantity, patterns in QUANTITIES.items():
        for pattern in patterns:
            found[quantity] |= {figure.replace(">=", "≥") for figure in re.findall(pattern, whole)}
    return found


def coarse(text: str) -> list[str]:
    """Bytes and times of `text` that have fewer than three digits, limits left out."""
    text = re.sub(OF, lambda m: f"{m['held']} {m['own'] or m['unit']}", " ".join(text.split()))
    text = re.sub(rf"(?:limit,?|budget of|% of) {_N} \w+", "", text)
    found = re.findall(rf"(?<![\w.,\[<])({_N}) ([KMGTP]iB|us|ms|s)\b", text)
    return [f"{n} {unit}" for n, unit in found if n != "0" and not n.startswith("0.") and _digits(n) < 3]


def _digits(number: str) -> int:
    return len(re.sub(r"\D", "", number))


def of_payload(data: Mapping[str, Any]) -> str:
    """What the widget of a report says, a line for each of its parts; its own figures as it formats them."""
    return plain("\n".join(_lines(data)))


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield _joined(data["verdict"]["spans"])
    yield from (*data["notes"], *data["foot"])
    for figure in data["figures"]:
        yield f"{figure['label']} {figure['value']}"
        yield f"{figure['note']}"
        yield f"in calls, {figure['note']}" if figure["label"].startswith("step") else ""
    yield from (f"{tab['label']} {tab['number']}" for tab in data["tabs"])
    if data["time"]:
        yield f"Predicted step {data['time']['text']}"
    if data["options"]:
        yield from (f"{change} {' '.join(values)}" for change, values, _ in data["options"]["rows"])
    if data["communication"]:
        yield _joined(data["communication"]["lead"])
        yield f"{byte_text(sum(row['wire_bytes'] for row in data['communication']['rows']))} sent"
    if data["pipeline"]:
        yield _joined(data["pipeline"]["lead"])
        yield data["pipeline"]["about"]
    yield from _of_memory(data["memory"]) if data["memory"] else ()


def _of_memory(memory: Mapping[str, Any]) -> Iterator[str]:
    yield _joined(memory["lead"])
    top, devices = memory["groups"][0]["top"], memory["devices"]
    if devices["peak"][top] is not None:
        yield f"peak {byte_text(devices['peak'][top])}"
    yield from (f"{role} {byte_text(devices[role][top])}" for role in memory["roles"])
    yield f"limit {memory['limit_text']}" if memory["limit_text"] else ""
    if memory["live"]:
        yield memory["live"]["lead"]


def _joined(spans: Iterable[tuple[str, str]]) -> str:
    return "".join(text for text, _ in spans)


def leaf_figures(data: Mapping[str, Any]) -> dict[str, str]:
    """What each leaf takes on a device, as the widget writes it."""
    return {path: plain(byte_text(n)) for path, n in zip(data["leaves"]["path"], data["leaves"]["held"], strict=True)}
