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


def sanitize(tool: str, name: str) -> subprocess.CompletedProcess:
    command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
    command += ["--error-exitcode", str(FOUND), sys.executable, "-m", "tests.gpu.small_runs", name]
    return subprocess.run(
        command,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", ["router", "decode", "grouped", "ring"])
def test_clean(tool, name):
    done = sanitize(tool, name)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "SUMMARY: 0 hazards displayed"}
    assert summary[tool] in done.stdout


@pytest.mark.parametrize(("tool", "name"), [("memcheck", "overrun"), ("racecheck", "race")])
def test_the_tool_sees_our_kernels(tool, name):
    done = sanitize(tool, name)
    assert done.returncode == FOUND, done.stdout[-4000:]
