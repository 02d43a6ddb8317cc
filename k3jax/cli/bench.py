"""Time a part of the layer against the memory floor; `k3jax bench experts`, `k3jax bench tail`.

Needs a GPU. Exit status 1 if an output is wrong; its time is not printed then.
"""

import argparse
import importlib

_PARTS = ("experts", "tail")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes; what follows the part is read by its benchmark."""
    parser.add_argument("part", choices=_PARTS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="see k3jax bench PART --help")


def run(args: argparse.Namespace) -> int:
    """Runs one benchmark."""
    benchmark = importlib.import_module(f"k3jax.bench.{args.part}")
    parser = argparse.ArgumentParser(prog=f"k3jax bench {args.part}", description=benchmark.__doc__)
    benchmark.add_arguments(parser)
    return benchmark.run(parser.parse_args(args.rest))
