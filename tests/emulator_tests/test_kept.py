"""Kept memory in the emulator: it outlives runs, starts filled, and is bounded like any array."""

import dataclasses

import jax
import numpy as np
import pytest

from k3jax.runtime.program import Kept
from k3jax.runtime.target import Target
from tests.emulator import LaunchError, OutOfBoundsError, run_program, run_programs
from tests.emulator.jax_calls import emulated_call
from tests.runtime.toy import tally_program

COUNT, FILL = 200, 7


@pytest.fixture
def x():
    return np.random.default_rng().integers(-1000, 1000, COUNT).astype(np.float32)


def test_the_next_run_starts_where_the_last_ended(x):
    program, kept = tally_program(COUNT, FILL), None
    for runs in range(3):
        emulation = run_program(program, [x], kept=kept)
        np.testing.assert_array_equal(emulation.results[0], x + FILL + runs)
        kept = emulation.kept
        assert [words.tolist() for words in kept] == [[0], [FILL, FILL, FILL + runs + 1, FILL]]


def test_each_rank_keeps_its_own(x):
    programs = [tally_program(COUNT, FILL), tally_program(COUNT, 2 * FILL)]
    first = run_programs(programs, [[x], [x]])
    second = run_programs(programs, [[x], [x]], kept=[run.kept for run in first])
    for rank, run in enumerate(second):
        np.testing.assert_array_equal(run.results[0], x + FILL * (rank + 1) + 1)


def test_accesses_beyond_it_are_refused(x):
    program = tally_program(COUNT, FILL)
    add, count = program.launches
    beyond = dataclasses.replace(count, arguments=(Kept(1, 16),))
    with pytest.raises(OutOfBoundsError, match=r"kept memory 1\[byte 16 of 16\]"):
        run_program(dataclasses.replace(program, launches=(add, beyond)), [x])
    with pytest.raises(LaunchError, match="8 bytes for kept memory 0"):
        run_program(program, [x], kept=[np.zeros(2, np.uint32), np.zeros(4, np.uint32)])


def test_calls_of_a_jax_function_keep_their_own(x):
    target = Target.named("h200")

    @jax.jit
    def twice(x):
        return [emulated_call(tally_program(COUNT, f), x, target=target)[0] for f in (FILL, FILL)]

    for runs in range(3):
        for y in twice(x):
            np.testing.assert_array_equal(y, x + FILL + runs)
