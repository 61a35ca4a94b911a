"""The options of a candidate's line that tell it from others, without those that the user gave for all."""

import re

_OPTION = re.compile(r"""--([\w-]+)(?:[ =]("[^"]*"|'[^']*'|(?!--)\S+))?""")
_FOR_ALL = ("mesh", "step", "spec", "rule", "donate", "no-donate", "on", "name")


def own_options(line: str) -> list[tuple[str, str]]:
    """The options of a line as (name, value), the value as it is typed.

    >>> own_options('fsdp --mesh "data=8" --remat "a|b" --pad --on v5e')
    [('remat', '"a|b"'), ('pad', '')]
    """
    return [(name, value) for name, value in _OPTION.findall(line) if name not in _FOR_ALL]
