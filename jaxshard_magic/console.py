"""Console script `jaxshard`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxshard_magic.errors import ShardError, parse_count


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return the exit status.

    Args:
        argv: Arguments; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="jaxshard", description="Sharded JAX train steps, explained.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a CNN on digits on 8 simulated devices, twice")
    demo.add_argument("--steps", type=_positive, default=60, metavar="N", help="steps a run (default: 60)")
    demo.add_argument(
        "--html",
        type=Path,
        default=Path("jaxshard-demo.html"),
        metavar="PATH",
        help="where the HTML report goes (default: jaxshard-demo.html)",
    )
    options = parser.parse_args(argv)
    if not options.html.parent.is_dir():
        parser.error(f"--html {options.html}: there is no folder {options.html.parent}")
    try:
        # Imported late: `--help` needs neither jax nor any other library.
        from jaxshard_magic.demo import run

        return 0 if run(options.steps, options.html) else 1
    except ShardError as error:
        print(f"jaxshard {options.command}: {error}", file=sys.stderr)
        return 1


def _positive(text: str) -> int:
    """Return a number of steps, 1 or more."""
    number = parse_count(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; give 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
