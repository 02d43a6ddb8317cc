"""A `Program` as the attributes of its custom call; `ffi/program.h` documents the format."""

import struct

import numpy as np

from k3jax.runtime.compile import CompiledKernel
from k3jax.runtime.program import (
    Argument,
    Kept,
    Kernel,
    Launch,
    Operand,
    Program,
    Result,
    Workspace,
)

FORMAT_VERSION = 2
OPERAND, RESULT, INT32, FLOAT32, WORKSPACE, KEPT = range(6)

Attributes = dict[str, str | bytes | np.ndarray]


def program_kernels(program: Program) -> tuple[Kernel, ...]:
    """The distinct kernels of a program, in order of first launch."""
    return tuple(dict.fromkeys(launch.kernel for launch in program.launches))


def serialize_program(program: Program, compiled: dict[Kernel, CompiledKernel]) -> Attributes:
    """Attributes of the custom call that runs `program`.

    Args:
        program: what to run.
        compiled: machine code for each of `program_kernels(program)`, all for one architecture.
    """
    kernels = program_kernels(program)
    (arch,) = {compiled[kernel].arch for kernel in kernels}
    words = [
        FORMAT_VERSION,
        len(program.operands),
        len(program.results),
        len(kernels),
        len(program.launches),
        len(program.kept),
    ]
    cubins = b""
    for kernel in kernels:
        cubin = compiled[kernel].cubin
        words += [len(cubins), len(cubin), kernel.threads, *kernel.cluster, kernel.shared_bytes]
        cubins += cubin
    for kept in program.kept:
        words += [kept.num_bytes, kept.fill]
    for launch in program.launches:
        words += _launch_words(launch, kernels.index(launch.kernel))
    return {
        "name": program.name,
        "arch": arch,
        "entries": "\n".join(compiled[kernel].entry for kernel in kernels),
        "cubins": cubins,
        "words": np.array(words, np.int64),
    }


def _launch_words(launch: Launch, kernel_index: int) -> list[int]:
    words = [kernel_index, *launch.grid, int(launch.overlaps_previous), len(launch.arguments)]
    for value in launch.arguments:
        words += _argument_words(value)
    return words


def _argument_words(value: Argument) -> tuple[int, int, int]:
    if isinstance(value, Operand):
        return OPERAND, value.index, value.offset
    if isinstance(value, Result):
        return RESULT, value.index, value.offset
    if isinstance(value, Workspace):
        return WORKSPACE, value.slot, value.offset
    if isinstance(value, Kept):
        return KEPT, value.index, value.offset
    if isinstance(value, int):
        return INT32, value, 0
    return FLOAT32, struct.unpack("<i", struct.pack("<f", value))[0], 0
