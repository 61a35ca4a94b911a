"""Files that are damaged, or made to do harm: `python tests/hostile_files.py 15000` tells what reading each came to.

Weights (safetensors, npz packed in every way, indexes), checkpoints, reports as JSON and rows of the history, with bits
flipped, cut off, with other values in their JSON, or a pipe, a device, a link or a folder in their place. Whatever is
read is sound, or one line that can be printed says why it is not, within seconds.
"""

import json
import os
import random
import resource
import shutil
import sqlite3
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from support.sample_reports import attached
from support.weight_files import loaded

from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf
from jaxshard_magic.checkpoints.store import list_checkpoints as checkpoints_listed
from jaxshard_magic.checkpoints.weight_loading import list_arrays
from jaxshard_magic.errors import ShardError
from jaxshard_magic.history import History
from jaxshard_magic.history import Store as HistoryStore
from jaxshard_magic.report import Report
from jaxshard_magic.step.replayed_calls import ReplayedCalls

LIMIT_S = 20.0  # of a machine that does other things, too
MEMORY = 2 << 30  # bytes by which the process may grow
LIKE = {"w": np.arange(64, dtype="float32").reshape(8, 8), "b": np.ones(3, "float32")}
REPORT = attached().to_json()
BOMB = zlib.compress(bytes(1 << 30))
PLAIN = 'null true -1 1.5 1e400 [] {} "" [1,2,3] {"a":1} NaN 0 "\\ud800" [[[]]]'  # values of JSON
COLUMNS = """name strategy mesh options typed device source step_s predicted_s on peak limit fits sent passed versions
    has_cell at notebook size writer"""  # of a row of the history
ESCAPES = "\x1b[31m\u202e\r\n\x00w"

Say = Callable[[str], object]


class Format:
    """Sound files of one kind: `write` makes them, `read` reads them and gives lines to `say`."""

    def write(self, folder: Path) -> None:
        raise NotImplementedError

    def read(self, folder: Path, say: Say) -> None:
        raise NotImplementedError


class Weights(Format):
    """A file, or a folder with an index, of weights."""

    def __init__(self, name: str, write: Callable[[Path], object]):
        self._name, self._write = name, write

    def write(self, folder: Path) -> None:
        self._write(folder / self._name)

    def read(self, folder: Path, say: Say) -> None:
        for line in list_arrays(folder / self._name):
            say(line)
        _, notes = loaded(folder / self._name, LIKE, PartitionSpec(), cast=True)
        for note in notes:
            say(note)


def zipped(method: int) -> Callable[[Path], None]:
    """Writes an npz that is packed so; numpy itself writes two of the ways."""

    def write(path: Path) -> None:
        plain = path.with_name("plain.npz")
        np.savez(plain, **LIKE)
        with zipfile.ZipFile(plain) as read, zipfile.ZipFile(path, "w", method) as written:
            for name in read.namelist():
                written.writestr(name, read.read(name))
        plain.unlink()

    return write


def indexed(path: Path) -> None:
    names = {"w": "one.safetensors", "b": "two.safetensors"}
    for name, file in names.items():
        save_file({name: LIKE[name]}, path.with_name(file))
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))


class Checkpoint(Format):
    """A folder with a checkpoint, as a loop has it."""

    def write(self, folder: Path) -> None:
        leaves = tuple(SavedLeaf(k, x.shape, str(x.dtype)) for k, x in LIKE.items())
        extra = {
            "kinds": [[[0, [], "float32"]]],
            "returned": {"which": np.zeros(1, np.uint16), "values0": np.zeros(4, np.uint8)},
            "sources": [["w", 1, 0]],
            "exact": True,
            "places": None,
        }
        with CheckpointStore(folder / "kept") as store:
            store.save(1, LIKE, CheckpointInfo(1, "dp", "data=1", leaves), extra)

    def read(self, folder: Path, say: Say) -> None:
        store = CheckpointStore(folder / "kept")
        for line in checkpoints_listed(store):
            say(line)
        for leaf in store.info(1).leaves:
            say(str(ShardError(str(leaf))))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for k, x in LIKE.items()}
        found = store.restore(1, target)
        ReplayedCalls(store, 1)
        for name, x in LIKE.items():
            assert np.array_equal(found[name], x), "other values were read, and nothing was said"


class OldCheckpoint(Checkpoint):
    """As it was written without checksums: what it holds may be wrong."""

    def write(self, folder: Path) -> None:
        super().write(folder)
        (folder / "kept" / "1" / "checksums.json").unlink()

    def read(self, folder: Path, say: Say) -> None:
        try:
            super().read(folder, say)
        except AssertionError:
            return


class ReportFile(Format):
    """A report as JSON."""

    def write(self, folder: Path) -> None:
        (folder / "report.json").write_text(REPORT)

    def read(self, folder: Path, say: Say) -> None:
        # Its text is read by the user: only that of a file which can be read into memory reaches the package.
        path = folder / "report.json"
        readable = path.is_file() and not path.is_symlink() and path.stat().st_size <= MEMORY
        text = path.read_text(errors="replace") if readable else ""
        Report.from_json(text)


class HistoryFile(Format):
    """The history; what is changed is a value of a row."""

    def write(self, folder: Path) -> None:
        store = HistoryStore(folder / "history.sqlite3")
        for _ in range(2):
            store.add(attached(), cell="train()", notebook="a.ipynb", versions={"jax": "1"})

    def read(self, folder: Path, say: Say) -> None:
        store = HistoryStore(folder / "history.sqlite3", tell=say)
        rows = store.rows()
        found = History(tuple(rows), store)
        for line in found.to_text().splitlines():
            say(line)
        found.to_html()
        for row in rows:
            store.report(row.id)
        found.to_json()


FORMATS: dict[str, Format] = {
    "safetensors": Weights("w.safetensors", lambda path: save_file(LIKE, path)),
    "npz": Weights("w.npz", zipped(zipfile.ZIP_STORED)),
    "npz, deflated": Weights("w.npz", zipped(zipfile.ZIP_DEFLATED)),
    "npz, bzip2": Weights("w.npz", zipped(zipfile.ZIP_BZIP2)),
    "npz, lzma": Weights("w.npz", zipped(zipfile.ZIP_LZMA)),
    "index": Weights("w.safetensors.index.json", indexed),
    "checkpoint": Checkpoint(),
    "checkpoint without checksums": OldCheckpoint(),
    "report": ReportFile(),
    "history": HistoryFile(),
}


class Damage:
    """Ways to damage files, each drawn by `choose`."""

    def __init__(self, choose: random.Random):
        self._choose = choose

    def __call__(self, kind: str, folder: Path) -> str:
        """Damage one of the files of a folder; what was done."""
        if kind == "history" and self._choose.random() < 0.7:
            return self._row(folder / "history.sqlite3")
        files = sorted(path for path in folder.rglob("*") if path.is_file() and "-lock" not in path.name)
        path = self._choose.choice(files)
        ways = [self._bits, self._bits, self._cut, self._instead]
        if path.suffix == ".json" or path.name in ("metadata", "_METADATA"):
            ways += [self._json] * 4
        if path.suffix == ".safetensors":
            ways += [self._header] * 4
        return f"{path.relative_to(folder)}: {self._choose.choice(ways)(path)}"

    def _bits(self, path: Path) -> str:
        data = bytearray(path.read_bytes())
        places = [self._choose.randrange(len(data)) for _ in range(self._choose.choice([1, 3, 40]))] if data else []
        for at in places:
            data[at] ^= 1 << self._choose.randrange(8)
        path.write_bytes(data)
        return f"bits {places[:3]}"

    def _cut(self, path: Path) -> str:
        data = path.read_bytes()
        at = self._choose.randrange(len(data) + 1)
        more = self._choose.choice([b"", bytes(100), b"\xff" * 10_000, data])
        path.write_bytes(data[:at] + more)
        return f"cut at {at}, {len(more)} more"

    def _instead(self, path: Path) -> str:
        path.unlink()
        way = self._choose.choice(["pipe", "zeros", "null", "itself", "nothing", "folder", "gone", "large", "root"])
        links = {
            "zeros": "/dev/zero",
            "null": "/dev/null",
            "itself": path.name,
            "nothing": "none",
            "root": "/",
        }
        if way in links:
            path.symlink_to(links[way])
        elif way == "pipe":
            os.mkfifo(path)
        elif way == "folder":
            path.mkdir()
        elif way == "large":
            path.touch()
            os.truncate(path, 1 << 40)
        return way

    def _json(self, path: Path) -> str:
        text, told = self.changed(path.read_text())
        path.write_text(text, errors="surrogatepass")
        return told

    def _header(self, path: Path) -> str:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        text, told = self.changed(data[8 : 8 + length].decode())
        header = text.encode(errors="surrogatepass")
        length = self._choose.choice([len(header)] * 8 + [0, 1 << 63, len(header) + 1])
        path.write_bytes(struct.pack("<Q", length) + header + data[8 + length :])
        return told

    def changed(self, text: str) -> tuple[str, str]:
        """JSON with one of its values, or names, another one."""
        try:
            data = json.loads(text)
        except ValueError:
            return text, "as it was"
        value = self._value()
        if self._choose.random() < 0.1:
            return text.replace("{", '{"w": 1, "w": 1, ', 1), "a name twice"
        spot, key = self._spot(data)
        if spot is None:
            return value, "all of it"
        mark = "a mark that stands nowhere else"
        if isinstance(spot, dict) and self._choose.random() < 0.3:
            spot[self._choose.choice([ESCAPES, "", "../../x", "x" * 100_000, "w/w"])] = spot.pop(key)
            return json.dumps(data), f"another name for {key}"
        spot[key] = mark
        return json.dumps(data).replace(json.dumps(mark), value), f"{key} = {value[:40]}"

    def _spot(self, data: Any) -> tuple[Any, Any]:
        """A dict or a list in JSON, and a place in it."""
        spots = []
        todo = [data]
        while todo:
            each = todo.pop()
            inner = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
            for key, value in inner:
                spots.append((each, key))
                todo.append(value)
        return self._choose.choice(spots) if spots else (None, None)

    def _value(self) -> str:
        """A value of JSON that is not what is expected."""
        deep, plain = 100_000, PLAIN.split()
        large = [str(10**18), "9" * 400, "9" * 5000, json.dumps("x" * 1_000_000), json.dumps([1] * 100_000)]
        nested = ["[" * deep, "[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep]
        names = [json.dumps(name) for name in (ESCAPES, "../../../etc/passwd", ["w"] * 3, [10**12] * 4)]
        return self._choose.choice(plain + large + nested + names)

    def _row(self, path: Path) -> str:
        tables = {
            "report": COLUMNS.split(),
            "content": ["searched", "cell", "report"],
        }
        table = self._choose.choice([*tables])
        column = self._choose.choice(tables[table])
        texts = ["x", "", ESCAPES, "[" * 100_000, "{}", "null", "another report"]
        others = [-1, 1.5, 10**18, float("inf"), b"\xff\xfe", b""]
        packed = [BOMB, zlib.compress(b"[" * 100_000), zlib.compress(b"{}")[:-3]]
        value: Any = self._choose.choice([*texts, *others, *packed])
        if value == "another report":
            value = zlib.compress(self.changed(REPORT)[0].encode(errors="surrogatepass"))
        with closing(sqlite3.connect(path)) as opened, opened:
            opened.execute(f'UPDATE {table} SET "{column}" = ? WHERE id = 1', (value,))
            if isinstance(value, bytes) and self._choose.random() < 0.3:  # text that is none
                opened.execute(f'UPDATE {table} SET "{column}" = CAST(? AS TEXT) WHERE id = 1', (value,))
        return f"{table}.{column} = {str(value)[:40]!r}"


def outcome(read: Callable[[Path, Say], None], folder: Path, lines: list[str] | None = None) -> str:
    """What reading comes to: "read", "told", or what is wrong with it. What is said goes to `lines`."""
    lines = [] if lines is None else lines
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read(folder, lines.append)
            end = "read"
        except ShardError as error:
            lines.append(str(error))
            end = "told"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.perf_counter() - start
    odd = next((line for line in lines if not line.replace("\u202f", "").replace("\u00a0", "").isprintable()), None)
    if odd is not None:
        return f"a line that moves the cursor: {odd[:200]!r}"
    return f"{end} after {seconds:.1f} s" if seconds > LIMIT_S else end


def told_when_nonsense(kind: str, place: Path) -> list[str]:
    """Files of a sound folder for which one line says what is wrong, when its bytes mean nothing."""
    sound = place / "sound"
    sound.mkdir()
    FORMATS[kind].write(sound)
    names = sorted(path.relative_to(sound) for path in sound.rglob("*") if path.is_file())
    told = []
    for n, name in enumerate(names):
        folder = place / str(n)
        shutil.copytree(sound, folder)
        (folder / name).write_bytes(b"\xff" * 100)
        lines: list[str] = []
        if outcome(FORMATS[kind].read, folder, lines) == "told" or any("damaged" in x for x in lines):
            told.append(str(name))
    return told


def faults(
    count: int, seed: int = 0, kinds: tuple[str, ...] = tuple(FORMATS), tell: Say = lambda _: None
) -> tuple[list[str], Counter[str]]:
    """What is wrong with how `count` damaged files are read, and what they came to."""
    choose, found, ends = random.Random(seed), list[str](), Counter[str]()
    damage = Damage(choose)
    with tempfile.TemporaryDirectory() as place:
        sound = {kind: Path(place, f"sound {n}") for n, kind in enumerate(kinds)}
        for kind, folder in sound.items():
            folder.mkdir()
            FORMATS[kind].write(folder)
            assert outcome(FORMATS[kind].read, folder) == "read", kind
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for n in range(count):
            kind, folder = choose.choice(kinds), Path(place, "damaged")
            shutil.copytree(sound[kind], folder)
            what = damage(kind, folder)
            end = outcome(FORMATS[kind].read, folder)
            ends[end if end in ("read", "told") else "wrong"] += 1
            if end not in ("read", "told"):
                found.append(f"{kind}, {what}: {end}")
                tell(found[-1])
            shutil.rmtree(folder)
            if n % 500 == 499:
                tell(f"{n + 1} files: {dict(ends)}")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        found.append(f"the process has grown by {grown:,} bytes")
    return found, ends


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    wrong, all_ends = faults(int(sys.argv[1]), *map(int, sys.argv[2:3]), tell=lambda line: print(line, flush=True))
    print(*wrong[:50], f"{dict(all_ends)}, {len(wrong)} wrong", sep="\n")
    sys.exit(bool(wrong))
