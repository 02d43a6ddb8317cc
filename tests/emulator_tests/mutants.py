"""Deletes one synchronising instruction of a kernel at a time: does the emulator notice?

    python -m tests.emulator_tests.mutants

runs the library's decode kernel and router this way and prints, for every deletion, what was found.
A survivor is an instruction that this input does not need, or a mistake that the emulator cannot
see (docs/testing.md lists those).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.program import Program
from tests.emulator import EmulationError, program, run_program

SYNCHRONISES = re.compile(
    r"(?:@!?%?\w+\s+)?\b(?:bar\.|barrier\.|mbarrier\.(?:arrive|expect_tx|try_wait|test_wait)|fence\.|"
    r"membar|griddepcontrol\.wait|cp\.async\.(?:bulk\.)?wait|wgmma\.(?:wait|fence)|st\.shared)"
    r"[^;]*;"
)
WAIT = re.compile(r"mbarrier\.(?:try|test)_wait\S*\s+(\S+),")


def mutants(ptx: str) -> Iterator[tuple[int, str, str]]:
    """Line number, deleted instruction and the rest of the module, for each deletion."""
    lines = ptx.split("\n")
    for i, line in enumerate(lines):
        for found in SYNCHRONISES.finditer(line):
            wait = WAIT.search(found[0])
            instead = f"setp.eq.u32 {wait[1]}, 0, 0;" if wait else ""
            changed = line[: found.start()] + instead + line[found.end() :]
            yield i + 1, found[0], "\n".join([*lines[:i], changed, *lines[i + 1 :]])


def attempt(
    what: Program, operands: list[np.ndarray], good: Callable[[np.ndarray], bool], **options
) -> str:
    """What the emulator says of a program: an error, wrong numbers, or nothing."""
    try:
        run = run_program(what, operands, patience=60, **options)
    except EmulationError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not run.written[0].all():
        return "parts of the result are not written"
    return "survives" if good(run.results[0]) else "wrong numbers"


def report(what: Program, operands, good, arch: str, **options) -> Iterator[tuple[str, str]]:
    """For every deletion of an executed instruction: what was deleted, what was found."""
    executed = run_program(what, operands, arch, **options).device.executed
    for kernel in dict.fromkeys(launch.kernel for launch in what.launches):
        compiled = compile_kernel(kernel, arch)
        for line, text, ptx in mutants(compiled.ptx):
            if line not in executed[compiled.entry]:
                continue
            mutated = dataclasses.replace(compiled, ptx=ptx)

            def swapped(other, arch, kernel=kernel, mutated=mutated):
                return mutated if other == kernel else compile_kernel(other, arch)

            with mock.patch.object(program, "compile_kernel", swapped):
                found = attempt(what, operands, good, arch=arch, **options)
            yield f"{type(kernel).__name__}, PTX line {line}: {text}", found


def _main() -> None:
    from tests.gpu.bit_programs import layer_cases

    for name, what, operands, _ in layer_cases(np.random.default_rng(0)):
        options = {"num_sms": 4}
        want = run_program(what, operands, **options).results[0]
        good = lambda got, want=want: got.tobytes() == want.tobytes()  # noqa: E731
        tally: dict[str, int] = {}
        for deleted, found in report(what, operands, good, "sm_90a", **options):
            print(f"{name}: {deleted}\n    {found}", flush=True)
            kind = found.partition(":")[0]
            tally[kind] = tally.get(kind, 0) + 1
        print(name, tally)


if __name__ == "__main__":
    _main()
