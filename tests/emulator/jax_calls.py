"""Programs inside JAX functions on a CPU: `call_program` with the emulator behind it."""

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from k3jax.runtime import ffi
from k3jax.runtime.program import Program
from k3jax.runtime.target import Target

from .program import run_program

_worker = ThreadPoolExecutor(1)
_worker.submit(int).result()
"""XLA's threads flush subnormal numbers to zero, and a thread inherits that from the one that
starts it. So the emulator gets a thread of its own, started here and now."""


def emulated_call(
    program: Program, *arrays: jax.Array, target: Target, has_side_effect: bool = False
) -> tuple[jax.Array, ...]:
    """Stands for `ffi.call_program`: same arguments, same results, under `jit` or not.

    Each traced call has kept memory of its own, which the devices that run it take in turns.
    """
    results = program.results[: len(program.results) - program.num_scratch]
    kept = None

    def emulate(operands):
        nonlocal kept
        run = run_program(program, operands, target.arch, kept=kept, num_sms=target.num_sms)
        kept = run.kept
        return tuple(run.results[: len(results)])

    def run(*operands):
        return _worker.submit(emulate, [np.asarray(x) for x in operands]).result()

    shapes = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in results)
    return jax.pure_callback(run, shapes, *arrays)


@pytest.fixture
def emulated(monkeypatch):
    """For one test, every op's custom calls run in the emulator."""
    original = ffi.call_program
    for module in list(sys.modules.values()):
        if getattr(module, "call_program", None) is original:
            monkeypatch.setattr(module, "call_program", emulated_call)
