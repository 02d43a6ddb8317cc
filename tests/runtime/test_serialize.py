import struct

import numpy as np
import pytest

from k3jax.runtime.compile import CompiledKernel
from k3jax.runtime.program import (
    ArraySpec,
    Kept,
    KeptSpec,
    Launch,
    Operand,
    Program,
    Result,
    Workspace,
)
from k3jax.runtime.serialize import FORMAT_VERSION, program_kernels, serialize_program
from tests.runtime.toy import Scale

SPEC = ArraySpec((100,), np.dtype(np.float32))
KEPT = (KeptSpec(8), KeptSpec(64, 0xFFFFFFFF))


def compiled(arch="sm_90a"):
    return {
        Scale(): CompiledKernel(arch, "first", b"\x7fELF12345", ""),
        Scale(threads=64, cluster=(2, 1, 1), shared_bytes=999): CompiledKernel(
            arch, "second", b"\x7fELF6", ""
        ),
    }


def launches():
    first, second = compiled()
    return (
        Launch(second, (4, 1, 1), (Operand(1, 8), Result(0, 4), -5, 0.5)),
        Launch(first, (7, 2, 1), (Workspace(3, 16), Result(1), 9, -1.0), overlaps_previous=True),
        Launch(second, (2, 1, 1), (Operand(0), Operand(1), 0, 0.0)),
        Launch(first, (1, 1, 1), (Kept(1, 64), Kept(0), 1, 0.0)),
    )


def bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little", signed=True)


def test_words_are_those_of_the_format():
    program = Program("sample", launches(), (SPEC, SPEC), (SPEC, SPEC), 1, KEPT)
    attributes = serialize_program(program, compiled())
    assert attributes["name"] == "sample"
    assert attributes["arch"] == "sm_90a"
    assert attributes["entries"] == "second\nfirst"
    assert attributes["cubins"] == b"\x7fELF6\x7fELF12345"
    assert attributes["words"].dtype == np.int64
    assert attributes["words"].tolist() == [
        *(FORMAT_VERSION, 2, 2, 2, 4, 2),
        *(0, 5, 64, 2, 1, 1, 999),
        *(5, 9, 128, 1, 1, 1, 0),
        *(8, 0),
        *(64, 0xFFFFFFFF),
        *(0, 4, 1, 1, 0, 4, 0, 1, 8, 1, 0, 4, 2, -5, 0, 3, bits(0.5), 0),
        *(1, 7, 2, 1, 1, 4, 4, 3, 16, 1, 1, 0, 2, 9, 0, 3, bits(-1.0), 0),
        *(0, 2, 1, 1, 0, 4, 0, 0, 0, 0, 1, 0, 2, 0, 0, 3, 0, 0),
        *(1, 1, 1, 1, 0, 4, 5, 1, 64, 5, 0, 0, 2, 1, 0, 3, 0, 0),
    ]


def test_each_kernel_is_carried_once():
    program = Program("sample", launches(), (SPEC, SPEC), (SPEC, SPEC), kept=KEPT)
    assert len(program_kernels(program)) == 2


def test_one_architecture_a_program():
    program = Program("sample", launches(), (SPEC, SPEC), (SPEC, SPEC), kept=KEPT)
    mixed = compiled() | {Scale(): compiled("sm_100a")[Scale()]}
    with pytest.raises(ValueError, match="too many values"):
        serialize_program(program, mixed)
