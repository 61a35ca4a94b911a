"""A user's objects are looked into without running their code."""

import functools

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx

from jaxshard_magic.introspect import (
    is_a,
    is_iterator,
    is_method,
    own_attributes,
    safe_repr,
    static_attribute,
)
from jaxshard_magic.notebook.cells.names import plain_function
from jaxshard_magic.program.cache_keys import cache_key
from jaxshard_magic.program.unwrap import unwrap_step


class Raising(Exception):
    pass


class Lazy:
    """Works inside of its own context alone."""

    def __init__(self):
        self.there = 1

    def __call__(self, x):
        return x

    def method(self):
        return 2

    @property
    def computed(self):
        raise Raising

    def __getattr__(self, name):
        raise Raising

    def __repr__(self):
        raise Raising

    def __eq__(self, other):
        raise Raising

    def __hash__(self):
        return 7

    def __bool__(self):
        raise Raising

    def __len__(self):
        raise Raising


class Proxy:
    """As werkzeug's: everything is asked of what it stands for."""

    def __getattribute__(self, name):
        raise Raising


class Slots:
    __slots__ = ("filled", "unset")

    def __init__(self):
        self.filled = 1

    def __getattr__(self, name):
        raise Raising


def function(x):
    return x


def test_attributes_are_those_that_objects_hold():
    lazy, slots = Lazy(), Slots()
    assert (static_attribute(lazy, "there"), static_attribute(lazy, "method")()) == (1, 2)
    assert [static_attribute(lazy, name, "none") for name in ("computed", "absent", "__wrapped__")] == ["none"] * 3
    assert (static_attribute(slots, "filled"), static_attribute(slots, "unset"), own_attributes(slots)) == (
        1,
        None,
        {"filled": 1},
    )
    assert static_attribute(Proxy(), "anything") is None
    assert own_attributes(Proxy()) == {}
    assert static_attribute(Lazy, "method") is Lazy.method


def test_what_python_and_jax_write_in_c_is_read():
    assert static_attribute(jax.jit(function), "__wrapped__") is function
    assert static_attribute(nnx.jit(function), "__wrapped__") is function
    assert static_attribute(functools.partial(function, 1), "func") is function
    assert static_attribute(Lazy().method, "__func__") is Lazy.method
    assert static_attribute(function, "__name__") == "function"
    assert is_method(Lazy().method) and not is_method(function) and not is_method(Lazy())


def test_types_alone_tell_what_an_object_is():
    assert not is_a(Proxy(), (dict, jax.Array)) and is_a(np.ones(1), np.ndarray)
    with pytest.raises(Raising):
        isinstance(Proxy(), dict)
    assert is_iterator(iter(())) and not is_iterator(Proxy()) and not is_iterator(Lazy())


def test_an_object_that_raises_is_called_by_its_type():
    assert safe_repr(Lazy()) == "<Lazy>" and safe_repr(1) == "1"


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, eqx.filter_jit, functools.partial, lambda f: f])
def test_the_function_under_wrappers_is_found(wrap):
    assert plain_function(wrap(function)) is function


def test_no_function_is_looked_for_under_a_lazy_object():
    assert plain_function(Lazy()) is plain_function(functools.partial(Lazy())) is plain_function(Proxy()) is None


def test_a_lazy_object_is_a_step():
    assert unwrap_step(Lazy()).name == "__call__"


def test_keys_of_objects_that_raise_are_equal_for_one_object():
    one, other = Lazy(), Lazy()
    assert cache_key(one) == cache_key(one) and cache_key(one) != cache_key(other)
    assert hash(cache_key(one)) == hash(cache_key(other))
