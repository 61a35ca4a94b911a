"""A table of names says which array of a file of weights is which of a state, and what it can't say is one line."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from support.refusals import refusal
from support.weight_files import ABOUT, loaded, same, values

from jaxshard_magic.checkpoints.name_rules import pair_file_names, pair_state_names, parse_rules
from jaxshard_magic.checkpoints.weight_loading import ArraySource, list_arrays
from jaxshard_magic.checkpoints.weight_saving import save_weights


@pytest.mark.parametrize(
    ("rule", "there", "here"),
    [
        ("a.b=c.d", {"a.b": (2,)}, {"c.d": (2,)}),
        ("model=", {"model.x.w": (2,)}, {"x.w": (2,)}),
        ("=params", {"x.w": (2,)}, {"params.x.w": (2,)}),
        ("h.*.fc=layers_*.up", {"h.3.fc.w": (2,)}, {"layers_3.up.w": (2,)}),
        ("*.weight=*.kernel", {"a.b.weight": (2,), "c.bias": (2,)}, {"a.b.kernel": (2,), "c.bias": (2,)}),
        ("h.*.w=h.w", {f"h.{i}.w": (2,) for i in range(11)}, {"h.w": (11, 2)}),
        ("h.*=h", {f"h.{i}.{n}": (2,) for n in "ab" for i in range(3)}, {"h.a": (3, 2), "h.b": (3, 2)}),
        (
            "h.*.e.*.w=h.*.w",
            {f"h.{i}.e.{j}.w": (2,) for i in range(2) for j in range(3)},
            {"h.0.w": (3, 2), "h.1.w": (3, 2)},
        ),
        ("h.*.e.*.w=w", {f"h.{i}.e.{j}.w": (2,) for i in range(2) for j in range(3)}, {"w": (2, 3, 2)}),
        ("mlp/~/linear/w=up.w", {"mlp/~/linear/w": (2,)}, {"up.w": (2,)}),
        ("w=w:T", {"w": (3, 5)}, {"w": (5, 3)}),
        ("conv=conv:2310", {"conv": (7, 5, 2, 3)}, {"conv": (2, 3, 5, 7)}),
    ],
)
def test_a_table_of_names_is_read_both_ways(rule, there, here, tmp_path):
    tree = {name: values(shape=shape) for name, shape in there.items()}
    save_file(tree, tmp_path / "w.safetensors")
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in here.items()}
    found, notes = loaded(tmp_path / "w.safetensors", wanted, P(), [rule])
    assert not notes
    save_weights(tmp_path / "new" / "again.safetensors", found, parse_rules([rule]), metadata=ABOUT)
    again = load_file(tmp_path / "new" / "again.safetensors")
    assert set(again) == set(tree) and all(same(again[name], x) for name, x in tree.items())
    for name in there:
        [named] = [x for x in pair_file_names(parse_rules([rule]), there, "w") if x.file_name == name]
        number = named.stack_index
        plain = tree[name].transpose([2, 3, 1, 0]) if "2310" in rule else tree[name].T if ":T" in rule else tree[name]
        assert same(np.asarray(found[named.state_name])[number], plain)
    assert {x.file_name for x in pair_state_names(parse_rules([rule]), here, "w")} == set(there)


TABLES = {
    "nothing": (
        ["fc.wieght=kernel"],
        "'fc.wieght=kernel' is of no array of w.safetensors. Did you mean 'fc.weight'?",
    ),
    "taken": (["fc=", "fc.bias=b"], "'fc.bias=b': rules before it have all of its arrays"),
    "both": (["fc.weight=fc.bias"], "fc.bias and fc.weight are both fc.bias here"),
    "no equals": (["fc"], "has no ="),
    "stars": (["fc=*"], "more * on your side"),
    "order": (["fc=fc:02"], ":02 is no order of dimensions"),
    "orders": (["h=h:10"], "h.0.w has 1 dimensions, and :10 is of 2"),
    "gap": (["h.*.w=h"], "the last is h.2.w, and there is none of number 1"),
    "grid": (["g.*.*=g"], "the last is g.1.0, and there is none of number 1.1"),
    "far": (["f.*=f"], "the last is f.999999999, and there is none of number 0"),
    "farther": (["f*=f"], "* is '.999999999' in f.999999999"),
    "words": (["fc.*=fc"], "* is 'bias' in fc.bias"),
    "unlike": (["x.*=x"], "x.0 float32[2] and x.1 float32[3] of w.safetensors differ"),
    "swapped": (
        ["fc.weight=kernel"],
        'its last two dimensions swapped, as torch has weights: --rename "fc.weight=kernel:T"',
    ),
    "shaped": (
        ["fc.weight=kernel:10", "y.*=z.*"],
        "the same elements in another shape: keep it as the file has it",
    ),
    "unstacked": (["fc.weight=kernel:T"], '--rename "y.*=y" stacks them'),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_table_that_does_not_fit_is_told_before_anything_is_read(what, tmp_path, monkeypatch):
    rules, said = TABLES[what]
    one = np.zeros(2, "float32")
    tree = {"fc.weight": np.zeros((4, 6), "float32"), "fc.bias": one, "h.0.w": one, "h.2.w": one, "x.0": one}
    tree |= {"g.0.0": one, "g.0.1": one, "g.1.0": one, "f.999999999": one}
    save_file(tree | {"x.1": np.zeros(3, "float32"), "y.0": one, "y.1": one}, tmp_path / "w.safetensors")
    monkeypatch.setattr(ArraySource, "part", lambda *_: pytest.fail("read"))
    like = {"kernel": np.zeros((6, 4), "float32"), "y": np.zeros((2, 2), "float32")}
    if what == "shaped":
        like["kernel"] = like["kernel"].reshape(6, 2, 2)
    assert said in refusal(loaded, tmp_path / "w.safetensors", like, rules=rules)


def test_names_that_differ_in_numbers_alone_are_told_in_a_line(tmp_path):
    layers = {f"h.{i}.w": np.zeros((2, 3), "float32") for i in range(12)}
    save_file(layers | {"norm": np.zeros(3, "float16")}, tmp_path / "w.safetensors")
    assert list_arrays(tmp_path / "w.safetensors") == [
        "w.safetensors: 13 arrays, 294 bytes",
        "h.*.w float32[2,3], 12 of them",
        "norm float16[3]",
    ]
