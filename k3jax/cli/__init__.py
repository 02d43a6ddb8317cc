"""The command line, `k3jax VERB`.

Each verb is a module here with `add_arguments(parser)` and `run(args)`, which returns an exit
status or None for 0; its docstring is its help. A module imports jax, and what needs jax, only
inside `run`.
"""

import argparse
import sys
from collections.abc import Sequence

from k3jax.cli import bench, demo, doctor, export, kernels, make_checkpoint, plan, run

_VERBS = {
    "demo": demo,
    "plan": plan,
    "run": run,
    "make-checkpoint": make_checkpoint,
    "export": export,
    "doctor": doctor,
    "kernels": kernels,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; what the user got wrong is one message on stderr and status 2."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        if args.traceback:
            raise
        print(f"k3jax {args.verb}: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="k3jax", description="The Kimi K3 MoE layer for JAX on NVIDIA GPUs.")
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error came from (before the verb)"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in _VERBS.items():
        description = module.__doc__ or ""
        verb = verbs.add_parser(name, help=description.partition("\n")[0], description=description)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser
