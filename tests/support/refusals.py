"""What a call that can't be done is refused with."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxshard_magic.errors import ShardError


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the `ShardError` that a call raises; it must be one line."""
    with pytest.raises(ShardError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
