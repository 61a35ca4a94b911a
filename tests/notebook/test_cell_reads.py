"""What a cell reads of the names that the notebook had before it: what it has to find, and what it may read."""

import sys

import pytest

from jaxshard_magic.notebook.cells import cell_reads

AT_ONCE = {
    "print(h)": {"h"},
    "h += 1": {"h"},
    "h = h + 1": {"h"},
    "h[0] = 1": {"h"},
    "h.x = 1": {"h"},
    "for i in h: pass": {"h"},
    "with h as g: pass": {"h"},
    "if h: pass": {"h"},
    "x, y = y, x": {"x", "y"},
    "y = [a for a in h]": {"h"},
    "y = f'{h!r:{w}}'": {"h", "w"},
    "def f(a=h): return a": {"h"},
    "@h\ndef f(): pass": {"h"},
    "class A(h, metaclass=m): pass": {"h", "m"},
    "f = lambda a=h: a": {"h"},
    "match h:\n    case 1: pass": {"h"},
    "y: T = h": {"h"},
    "(y := h)": {"h"},
    "global h\nh": {"h"},
    "await h": {"h"},
    "%time y = h": {"h"},
    "%%time\ny = h": {"h"},
}
PERHAPS = {
    "if c:\n    h": {"h"},
    "c and h": {"h"},
    "h if c else k": {"h", "k"},
    "while c: h": {"h"},
    "for i in c: h": {"h"},
    "try:\n    h\nexcept NameError:\n    h = 1": {"h"},
    "if c:\n    h = 1\nc, h": {"h"},
    "for i in c:\n    h = i\nc, h": {"h"},
    "with c:\n    h = 1\nc, h": {"h"},
    "[c for c in c if h]": {"h"},
    "def f(): return h": {"h"},
    "f = lambda: h": {"h"},
    "def f():\n    def g(): return h\n    return g": {"h"},
    "class A:\n    h = h": {"h"},
    "class A:\n    def f(self): return h": {"h"},
    "class A:\n    h = 1\n    def f(self): return h": {"h"},
    "def f(): return h\nf()\nh = 1": {"h"},
    "def f():\n    global h\n    h = 1\nf()\nh": {"h"},
    "try:\n    from k import h\nexcept ImportError: pass\nh": {"h"},
    "match c:\n    case [h, 1]: pass\nc, h": {"h"},
    "del h": {"h"},
    "exec('h = 1')\nh": {"h"},
    "from k import *\nh": {"h"},
    "eval('h')": {"h"},
    "%timeit h": {"h"},
    "!ls {h}": {"h"},
    "%%shard fsdp --spec \"batch=P('data')\"\npass": {"P"},
    "c and (lambda: h)()": {"h"},
}
OWN = [
    "h = 1\nh",
    "def f(h): return h",
    "def f(*h, **k): return h, k",
    "def f():\n    h = 1\n    return h",
    "def f():\n    h = 1\n    def g():\n        nonlocal h\n        h += 1\n        return h\n    return g",
    "def f():\n    for h in (): h\n    with open('') as k: k\n    import h.k\n    return h",
    "lambda h: h",
    "[h for h in ()]",
    "{h: k for h, k in ()}",
    "import h\nh.k",
    "import h.k\nh",
    "from k import h\nh",
    "import k as h\nh",
    "for h in (): h",
    "with open('') as h: h",
    "def h(): return h",
    "class h:\n    def f(self): return h",
    "def f(): return h\nh = 1\nf()",
    "class A:\n    h = 1\n    k = h",
    "try:\n    pass\nexcept E as h:\n    h",
    "match 1:\n    case {'a': h, **k}:\n        h, k",
    "match 1:\n    case [h, *k]:\n        h, k",
    "%%bash\necho $h",
    "not python h",
]


@pytest.mark.parametrize(("cell", "names"), AT_ONCE.items())
def test_a_name_that_is_read_whatever_happens_has_to_be_there(cell: str, names: set[str]):
    assert names <= cell_reads(cell).certain <= cell_reads(cell).possible


@pytest.mark.parametrize(("cell", "names"), PERHAPS.items())
def test_a_name_that_may_be_read_is_wanted_and_not_demanded(cell: str, names: set[str]):
    found = cell_reads(cell)
    assert names <= found.possible and names.isdisjoint(found.certain)


@pytest.mark.parametrize("cell", OWN)
def test_a_name_that_a_cell_binds_before_it_reads_it_is_its_own(cell: str):
    assert {"h", "k"}.isdisjoint(cell_reads(cell).possible)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is Python 3.12's")
def test_parameters_of_types_are_a_functions_own():
    assert cell_reads("def f[h](x: h) -> h:\n    y: h = x\n    return y").possible.isdisjoint({"h", "y"})
    assert "h" in cell_reads("def f[T](x: T) -> T:\n    return h").possible
