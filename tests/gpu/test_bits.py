"""The card gives the bits that the emulator gave, for programs recorded beforehand."""

import os
from pathlib import Path

import pytest

from tests.gpu.compare_bits import compare


@pytest.mark.gpu
def test_recorded_programs():
    """`python -m tests.gpu.compare_bits record FILE` makes the file, where the CuTe DSL is."""
    path = os.environ.get("K3JAX_EMULATED_BITS")
    if path is None:
        pytest.skip("K3JAX_EMULATED_BITS names no file of recorded results")
    assert compare(Path(path))
