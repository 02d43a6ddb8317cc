"""The kernels under compute-sanitizer: no access out of bounds, no race in shared memory."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
    pytest.mark.skipif(
        shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer (CUDA toolkit)"
    ),
]

FOUND = 9


def sanitize(tool: str, *case: str) -> subprocess.CompletedProcess:
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND), sys.executable, "-m", "tests.gpu.small_runs", *case]
    return subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["router", "single", "decode", "grouped", "grouped on wide ranks"])
def test_no_access_out_of_bounds(name):
    done = sanitize("memcheck", name)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


@pytest.mark.parametrize("name", ["router", "ring", "handover"])
def test_no_race(name):
    done = sanitize("racecheck", name)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "RACECHECK SUMMARY: 0 hazards displayed" in done.stdout


@pytest.mark.parametrize("name", ["single", "decode", "grouped", "grouped on wide ranks"])
def test_no_race_with_every_lane_arriving(name):
    """Expert kernels, built as racecheck can follow them; else they are the same."""
    done = sanitize("racecheck", name, "32")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "RACECHECK SUMMARY: 0 hazards displayed" in done.stdout


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("memcheck", "overrun"),
        ("racecheck", "race"),
        ("racecheck", "early handover"),
        ("racecheck", "handover by one lane"),
    ],
)
def test_what_the_tool_reports(tool, name):
    """Planted faults; and a right handover, in which one lane arrives at a barrier for its warp.

    The expert kernels hand over like that, so racecheck judges builds in which every lane arrives.
    """
    done = sanitize(tool, name)
    assert done.returncode == FOUND, done.stdout[-4000:]
