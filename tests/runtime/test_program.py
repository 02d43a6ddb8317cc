import dataclasses

import numpy as np
import pytest

from k3jax.runtime.program import (
    MAX_KEPT_BYTES,
    ArraySpec,
    Kept,
    KeptSpec,
    Launch,
    Operand,
    Program,
    Result,
    Workspace,
)
from tests.runtime.toy import CountRun, Scale, tally_program

SPEC = ArraySpec((100,), np.dtype(np.float32))


def program(source):
    launch = Launch(Scale(), (1, 1, 1), (source, Result(0), 100, 1.0))
    return Program("sample", (launch,), (SPEC,), (SPEC,), kept=(KeptSpec(8),))


@pytest.mark.parametrize("source", [Operand(0, 400), Result(0), Kept(0, 8), Workspace(3, 1 << 20)])
def test_addresses_within_their_memory(source):
    assert program(source).launches[0].arguments[0] == source


@pytest.mark.parametrize("kind", [Operand, Result, Kept])
def test_addresses_outside_their_memory_are_refused(kind):
    for index in (-1, 1):
        with pytest.raises(ValueError, match=rf"sample: {kind.__name__}.*but there are 1"):
            program(kind(index))
    for offset in (-1, 401):
        with pytest.raises(ValueError, match=rf"sample: {kind.__name__}.*lies outside"):
            program(kind(0, offset))


def test_arguments_fit_their_parameters():
    with pytest.raises(TypeError, match=r"Scale takes 4 arguments .*'factor'\], got 1"):
        Launch(Scale(), (1, 1, 1), (Operand(0),))
    for wrong in ((1, Result(0), 1, 1.0), (Operand(0), Result(0), Kept(0), 1.0)):
        with pytest.raises(TypeError, match=r"Scale: parameter '\w+' is \w+, got"):
            Launch(Scale(), (1, 1, 1), wrong)


def test_kept_memory_is_made_of_words():
    for num_bytes in (0, -4, 6, MAX_KEPT_BYTES + 4):
        with pytest.raises(ValueError, match="num_bytes must be a multiple of 4"):
            KeptSpec(num_bytes)
    for fill in (-1, 1 << 32):
        with pytest.raises(ValueError, match="fill must be an unsigned 32-bit word"):
            KeptSpec(4, fill)


def test_a_program_that_keeps_memory_starts_after_its_last_run():
    launch = Launch(CountRun(), (1, 1, 1), (Kept(1),), overlaps_previous=True)
    with pytest.raises(ValueError, match="overlaps_previous=False"):
        dataclasses.replace(tally_program(100, 0), launches=(launch,))
