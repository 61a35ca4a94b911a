"""Plant the faults of faults.toml, one at a time, and tell whether the suite finds each.

python tests/faults/plant.py [--only NAME ...] [--checkout PATH] [--quick] [pytest arguments]

The checkout, by default the one that this file is in, is copied first and stays as it is. The tests that should find a
fault run before the whole suite does, which `--quick` leaves out; the first failure ends them, and counts where the
same test passes without the fault. Takes from 5 to 60 seconds a fault that is caught by the tests that should.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "node_modules", ".pytest_cache", ".ruff_cache")
NEWEST = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """`text` stands once in the sources, and `fault` in its place is wrong; a test of one of `files` fails then."""

    name: str
    what: str
    text: str
    fault: str
    files: tuple[str, ...]

    def place(self, checkout: Path) -> Path:
        """The source file that holds `text`. Raises ValueError unless it stands there once, and in no other."""
        counts = {path: path.read_text("utf-8").count(self.text) for path in sources(checkout)}
        places = [path for path, count in counts.items() if count]
        if len(places) != 1 or counts[places[0]] != 1:
            raise ValueError(f"{self.name}: {self.text!r} stands {sum(counts.values())} times, and must stand once")
        return places[0]


def faults() -> list[Fault]:
    """All of them, in the order of the list."""
    rows = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))
    return [Fault(name, **row | {"files": tuple(row["files"])}) for name, row in rows.items()]


def sources(checkout: Path) -> list[Path]:
    """The package's modules and the widgets' sources."""
    modules = sorted((checkout / "jaxshard_magic").rglob("*.py"))
    return modules + [p for p in sorted((checkout / "widgets").rglob("*.js")) if "node_modules" not in p.parts]


def tests(checkout: Path, arguments: list[str]) -> tuple[int, str]:
    """The exit status of pytest in `checkout`, and what it printed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def caught(fault: Fault, checkout: Path, quick: bool, more: list[str]) -> str | None:
    """The test that fails with the fault and passes without it, None where no test does; `checkout` is left sound."""
    place = fault.place(checkout)
    sound = place.read_text("utf-8")
    files = [f"tests/{file}" for file in fault.files if (checkout / "tests" / file).exists()]
    for arguments in ([["-n0", *files]] if files else []) + ([] if quick else [["-n2"]]):
        place.write_text(sound.replace(fault.text, fault.fault), "utf-8")
        try:
            status, said = tests(checkout, [*arguments, *more])
        finally:
            place.write_text(sound, "utf-8")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", said, re.MULTILINE)
        if status == 1 and failed and tests(checkout, ["-n0", failed[1]])[0] == 0:
            return failed[1]
        if status not in (0, 1):
            raise RuntimeError(f"{fault.name}: pytest ended with {status}\n{said[-2000:]}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; may be given several times")
    parser.add_argument("--checkout", type=Path, default=NEWEST, help="whose package and tests are taken")
    parser.add_argument("--quick", action="store_true", help="run no more than the tests that should find it")
    given, more = parser.parse_known_args()
    chosen = [fault for fault in faults() if given.only is None or fault.name in given.only]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(given.checkout, copy, ignore=LEFT_OUT)
        for fault in chosen:
            by = caught(fault, copy, given.quick, more)
            missed += by is None
            print(f"{fault.name}: {'MISSED' if by is None else f'caught by {by}'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
