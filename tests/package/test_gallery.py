"""The gallery: models of the published sizes, steps that can be called again, a table that says what is not known."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from support.thinned import thinned

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import published
from gallery import Row
from gallery_page import page, table
from models import gpt, llama, resnet, vit

CALLS = {
    "ResNet-50": lambda: resnet.call(resnet.DEPTH_50, 8),
    "GPT-2 medium": lambda: gpt.call(replace(gpt.MEDIUM, vocabulary=50_257), 8),
    "GPT-3": lambda: gpt.call(replace(gpt.GPT3, vocabulary=50_257), 8),
    "ViT-g/14": lambda: vit.call(vit.G_14, 8),
    "Llama 3 8B": lambda: llama.call(llama.LLAMA3_8B, 8, 4096),
    "Llama 3 70B": lambda: llama.call(llama.LLAMA3_70B, 8, 4096),
    "Qwen3 0.6B": lambda: llama.call(llama.QWEN3_600M, 8, 4096),
}
# Published: torchvision's count of ResNet-50, Hugging Face's of GPT-2, Llama and Qwen3; of GPT-3 Brown et al. 2020,
# table D.1, in hundreds of millions; of ViT-g/14 Zhai et al. 2022, table 2, in millions and without the classes' head.
PUBLISHED = {
    "ResNet-50": (25_557_032, 0),
    "GPT-2 medium": (354_823_168, 0),
    "GPT-3": (174_600_000_000, 50_000_000),
    "ViT-g/14": (1_011_000_000 + 1000 * (vit.G_14.width + 1), 500_000),
    "Llama 3 8B": (8_030_261_248, 0),
    "Llama 3 70B": (70_553_706_496, 0),
    "Qwen3 0.6B": (596_049_920, 0),
}


@pytest.mark.parametrize("model", CALLS)
def test_a_model_has_as_many_parameters_as_was_published(model):
    published, rounding = PUBLISHED[model]
    assert abs(CALLS[model]().parameters - published) <= rounding


@pytest.mark.ci
@pytest.mark.parametrize("model", thinned([name for name in CALLS if not name.startswith("Llama")], ("GPT-2 medium",)))
def test_a_step_gives_back_a_state_of_the_shapes_that_it_took_and_a_loss(model):
    call = CALLS[model]()
    static = tuple(i for i, arg in enumerate(call.args) if isinstance(arg, bool))
    made = jax.jit(call.step, static_argnums=static).eval_shape(*call.args)
    state, loss = made if isinstance(made, tuple) else (None, made)
    assert loss.shape == ()
    if state is not None:
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, call.args[0])]
        assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


ROW = Row("gpt2-medium", "GPT-2 medium", 354_871_296, "96 texts", "a100-40:8", "dp", line='dp --mesh "data=8"')


def test_what_is_not_known_of_a_row_is_a_dash():
    text = table([ROW])
    assert "- of -" in text and "0 B" not in text and "None" not in text


def test_a_row_that_was_planned_alone_says_so_at_each_figure_and_why():
    planned = replace(ROW, source="planned", fits=True, peak=2**30, limit=2**31, step_s=0.5, seconds=3.0)
    planned = replace(planned, why="compiling it takes more than 120 s", date="2026-11-24", cores=2)
    for text in (table([planned]), page([planned])):
        text = text.replace("\u202f", " ")
        assert "yes, as planned" in text and "about 1.00 of 2 GiB" in text and "at least 500 ms" in text
        assert "GPT-2 medium on" in text and "more than 120 s" in text


def test_the_readme_of_the_benchmarks_names_the_gallery():
    text = (Path(__file__).parents[2] / "benchmarks/README.md").read_text()
    assert "python benchmarks/gallery.py" in text


# Runs that others have published


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_published_run_is_within_a_tenth_of_its_plan_and_inside_of_its_range():
    case = published.CASES["v5p-128b"]
    got = published.predicted(case, published.facts(case, compiled=False))
    assert got.low is not None and got.step is not None and got.high is not None
    assert got.low <= case.seconds <= got.high
    assert got.step == pytest.approx(case.seconds, rel=published.LIMIT)


def test_a_published_share_of_the_peak_is_a_time():
    """6 FLOPs a weight and token, but for the embedding, and 12 a score, for one of 128 v5p with one text of 2,048."""
    case = published.CASES["v5p-128b"]
    weights = 64 * (4 * 8192 * 16384 + 3 * 8192 * 57344) + 8192 * 32000
    scores = 64 * 2048 * 16384
    assert case.seconds == pytest.approx(2048 * (6 * weights + 12 * scores) / (0.6868 * 4.59e14))
