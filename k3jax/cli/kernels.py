"""Compile every kernel, with no GPU, and print what its machine code holds.

Exit status 1 if one does not compile or keeps anything in local memory (a spill).
"""

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument(
        "--arch",
        default="sm_90a,sm_100a,sm_103a",
        help="architectures, joined by commas (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each kernel and architecture."""
    from k3jax.ops.kernels import all_kernels

    rows = [
        _inspect(name, kernel, arch)
        for name, kernel in all_kernels().items()
        for arch in args.arch.split(",")
        if kernel.compiles_for(arch)
    ]
    print(json.dumps(rows, indent=2) if args.json else _render(rows))
    bad = [row for row in rows if row["problem"]]
    for row in bad:
        print(f"{row['kernel']} on {row['arch']}: {row['problem']}", file=sys.stderr)
    return 1 if bad else 0


def _inspect(name: str, kernel, arch: str) -> dict:
    from k3jax.runtime.compile import compile_kernel
    from k3jax.runtime.sass import inspect_cubin

    row = {"kernel": name, "arch": arch, "shared_bytes": kernel.shared_bytes, "problem": None}
    try:
        (report,) = inspect_cubin(compile_kernel(kernel, arch).cubin)
    except Exception as error:
        return row | {"problem": f"does not compile: {error}"}
    if report.spills:
        row["problem"] = (
            f"spills: stack {report.stack_bytes} B, local {report.local_bytes} B, "
            f"{report.spill_instructions} instructions"
        )
    census = {kind: report.of_class(kind) for kind in ("matrix", "copy", "sync")}
    return row | {"registers": report.registers, "threads": kernel.threads} | census


def _render(rows: list[dict]) -> str:
    lines = [f"{'kernel':44} {'arch':8} {'threads':>7} {'regs':>5} {'shared':>7}  instructions"]
    for row in rows:
        if "registers" not in row:
            lines.append(f"{row['kernel']:44} {row['arch']:8} {row['problem']}")
            continue
        census = [f"{n} {m}" for kind in ("matrix", "copy", "sync") for m, n in row[kind].items()]
        lines.append(
            f"{row['kernel']:44} {row['arch']:8} {row['threads']:7} {row['registers']:5} "
            f"{row['shared_bytes']:7}  {', '.join(census)}"
        )
    return "\n".join(lines)
