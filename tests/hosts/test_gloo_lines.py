"""Gloo's lines, mixed piece by piece, taken out of what else is written: to the letter, or not at all."""

import random
from itertools import pairwise

import pytest

from jaxshard_magic.hosts.native_output import PIECES, GlooFilter

pytestmark = pytest.mark.no_jax


def lines(ranks: list[int], peers: int, draw: random.Random) -> str:
    """What threads write that each say one line, in pieces at random."""
    numbers = {1: None, 3: str(peers), 6: str(peers)}
    todo = [[str(rank if i == 1 else numbers[i]) if p is None else p for i, p in enumerate(PIECES)] for rank in ranks]
    text = ""
    while any(todo):
        line = draw.choice([each for each in todo if each])
        text += "".join(line.pop(0) for _ in range(min(draw.randint(1, 4), len(line))))
    return text


def shown(text: str, draw: random.Random) -> str:
    """What is left of a text that comes in pieces at random."""
    only = GlooFilter()
    cuts = [0, *sorted(draw.sample(range(len(text)), min(6, len(text)))), len(text)]
    return "".join([*(only.feed(text[a:b]) for a, b in pairwise(cuts)), only.release()])


@pytest.mark.parametrize("seed", range(8))
def test_what_stands_around_mixed_lines_is_shown_to_the_letter(seed: int):
    draw = random.Random(seed)
    for _ in range(25):
        peers = draw.choice([1, 3, 7, 15, 127])
        ranks = draw.sample(range(peers + 1), min(draw.choice([1, 2, 4, 8]), peers + 1))
        before, after = (
            draw.choice(["", "12345", "2.5956", "a\n", "7"]),
            draw.choice(["", "2.5\n", "12345", "\n", " 7"]),
        )
        text = before + lines(ranks, peers, draw) + after
        assert shown(text, draw) == before + after, text


@pytest.mark.parametrize("seed", range(4))
def test_nothing_of_a_text_is_lost_that_is_written_into_the_lines(seed: int):
    draw = random.Random(seed)
    for _ in range(50):
        whole = lines([0, 1], draw.choice([1, 7]), draw)
        at = draw.randint(len(PIECES[0]) + 1, len(whole) - 1)
        other = draw.choice(["12345\n", "7\n", "x", "2.5956", "\n"])
        assert other in shown(whole[:at] + other + whole[at:], draw)


@pytest.mark.parametrize(
    "text",
    [
        "[Gloo] Rank is my band\n",
        "[Gloo] Rank 3 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 2\n",
        "[Gloo] Rank 0 is connected to ",
        "[Glo",
        "1000 steps\n12345\n",
    ],
)
def test_what_gloo_does_not_write_is_left(text: str):
    only = GlooFilter()
    assert only.feed(text) + only.release() == text


def test_text_that_can_be_no_line_of_gloos_is_not_waited_for():
    only = GlooFilter()
    assert [only.feed(each) for each in ("loss 2.5", "956\n", "a[", "b")] == ["loss 2.5", "956\n", "a", "[b"]
