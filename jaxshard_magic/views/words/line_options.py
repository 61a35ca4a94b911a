"""Options of a candidate's line that distinguish it from other candidates."""

import re

_OPTION = re.compile(r"""--([\w-]+)(?:[ =]("[^"]*"|'[^']*'|(?!--)\S+))?""")
_FOR_ALL = ("mesh", "step", "spec", "rule", "donate", "no-donate", "on", "name")


def distinguishing_options(line: str) -> list[tuple[str, str]]:
    """Return the options of a line as (name, value), with values as typed, without options given for all candidates.

    >>> distinguishing_options('fsdp --mesh "data=8" --remat "a|b" --pad --on v5e')
    [('remat', '"a|b"'), ('pad', '')]
    """
    return [(name, value) for name, value in _OPTION.findall(line) if name not in _FOR_ALL]
