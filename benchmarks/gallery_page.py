"""The gallery's rows as a table for a terminal and as a page of the book."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.views.format import (
    SPACE,
    UNKNOWN,
    byte_parts,
    byte_text,
    count_text,
    limit_parts,
    limit_text,
    seconds_text,
)
from jaxshard_magic.views.terminal import plain_signs, terminal_text
from jaxshard_magic.views.terminal import table as columns

if TYPE_CHECKING:
    from gallery import Row

_WHAT = """\
# Gallery

Steps that people ask about, each at its published size, on hardware that nobody has to own: shapes go in, and the
compiler of the named chip says what comes out. No weight is made, nothing runs.

```bash
python benchmarks/gallery.py --json gallery.json --markdown docs/gallery.md
```

The figures are predictions from the compiled programs for the named hardware; no step was timed on a real chip. *Took*
is the time from the mesh's text to the figures, with nothing cached."""
_READING = """\
They are written as people write them, in `benchmarks/models/`: parameters and the optimizer's moments in float32,
products in bfloat16, attention by `jax.nn.dot_product_attention` without a fused kernel, the layers in one `scan`
(ResNet's are not). GPT-3, the vision transformers, Llama and Qwen3 compute each layer again in the backward pass. The
vocabulary of GPT-2 and GPT-3 is padded from 50,257 to 50,304, as trainers do.

## How to read it

- **Fits** is the compiler's own account against what a program gets of the chip's memory, of a GPU three quarters, as
  jax takes unless told otherwise.
- **Sent** is what one device sends in a step, all collectives together.
- **Step time** is the best guess of [Predictions](predictions.md). What lies between products is a rule of thumb:
  ResNet's batch norms wait for the memory, and a real step takes longer. *At least* is by the plan alone, to which no
  compiler has added anything.
- **`auto`** searches all strategies on all meshes of the devices, with microbatches and remat where memory is short,
  until none that is left can be faster or its time is over: *6 of 97* has compiled 6 of the 97 that it planned. Of
  those that are predicted to be as fast, within half a percent, it takes the simplest.
"""
_LEFT = ("step", "devices", "asked", "line", "fits", "bound", "took")


def table(rows: "Sequence[Row]") -> str:
    """The rows below each other, those of a step under its name."""
    shown = {
        "step": _once([row.model for row in rows]),
        "devices": _once([row.devices for row in rows]),
        "asked": [row.asked for row in rows],
        "line": [row.line or UNKNOWN for row in rows],
        "fits": [_fits(row) for row in rows],
        "peak": [_peak(row) for row in rows],
        "sent": [byte_text(row.sent) for row in rows],
        "step time": [_time(row) for row in rows],
        "bound": [row.bound or UNKNOWN for row in rows],
        "took": [_took(row) for row in rows],
    }
    said = [f"{row.model} on {row.devices}, {row.asked}: {row.why}" for row in rows if row.why]
    lines = columns({head: list(map(plain_signs, texts)) for head, texts in shown.items()}, _LEFT, "")
    return terminal_text([*lines, *([""] if said else []), *map(plain_signs, said)])


def page(rows: "Sequence[Row]") -> str:
    """A page in Markdown."""
    return "\n".join([*_head(rows), *_cases(rows), *_steps(rows), _READING])


def _head(rows: "Sequence[Row]") -> list[str]:
    dates = sorted({row.date for row in rows})
    versions = {name: version for row in rows for name, version in row.versions.items()}
    made = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    cores = max(row.cores for row in rows)
    load = max(row.load for row in rows)
    busy = f" that other work shared, a load of up to {load:.0f}" if load > cores + 1 else ""
    most = f"a search was given {seconds_text(max(row.given for row in rows))}"
    return [_WHAT, "", *textwrap.wrap(f"Made on {when} with {made}, on {cores} cores{busy}; {most}.", 118), ""]


def _cases(rows: "Sequence[Row]") -> list[str]:
    heads = ("Step", "Devices", "`%%shard`", "Fits", "Peak a device", "Sent a device", "Step time", "Took")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    models, devices = _once([row.model for row in rows]), _once([f"{row.case}|{row.devices}" for row in rows])
    for row, model, on in zip(rows, models, devices, strict=True):
        line = UNKNOWN if row.line is None else f"`{row.line}`"
        asked = f"`auto` chooses {line}" if row.asked == "auto" else line
        fits = f"**{_fits(row)}**" if row.fits is False else _fits(row)
        cells = (f"**{model}**" if model else "", f"`{row.devices}`" if on else "", asked, fits, _peak(row))
        rest = (byte_text(row.sent), _time(row), _took(row))
        lines.append("| " + " | ".join((*cells, *rest)) + " |")
    return [*lines, ""]


def _steps(rows: "Sequence[Row]") -> list[str]:
    lines = ["## The steps", ""]
    for row in {(row.model, row.devices): row for row in rows}.values():
        lines.append(
            f"- **{row.model}** on `{row.devices}`: {count_text(row.parameters)} parameters; {row.batch} a step."
        )
    said = [f"- {row.model} on `{row.devices}`, {row.asked}: {row.why}." for row in rows if row.why]
    return [*lines, "", *([*("Planned alone:", ""), *said, ""] if said else [])]


def _once(texts: Sequence[str]) -> list[str]:
    """What repeats the row above is left out."""
    return [text if i == 0 or text != texts[i - 1] else "" for i, text in enumerate(texts)]


def _fits(row: "Row") -> str:
    if row.fits is None:
        return UNKNOWN
    return ("yes" if row.fits else "no") + (", as planned" if row.source == "planned" else "")


def _peak(row: "Row") -> str:
    about = "about " if row.source == "planned" and row.peak is not None else ""
    if row.peak is None or row.limit is None:
        return f"{about}{byte_text(row.peak)} of {limit_text(row.limit)}"
    (size, unit), (limit, limit_unit) = byte_parts(row.peak), limit_parts(row.limit)
    return f"{about}{size}{'' if unit == limit_unit else SPACE + unit} of {limit}{SPACE}{limit_unit}"


def _time(row: "Row") -> str:
    least = "at least " if row.source == "planned" and row.step_s is not None else ""
    return f"{least}{seconds_text(row.step_s)}"


def _took(row: "Row") -> str:
    tried = "" if row.candidates is None else f", {count_text(row.tried)} of {count_text(row.candidates)}"
    return f"{seconds_text(row.seconds)}{tried}"
