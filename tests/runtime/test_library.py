import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import k3jax.runtime
from k3jax.runtime import library

REPOSITORY = Path(__file__).parents[2]

QUERY_FAKE = """
import ctypes, dataclasses, json, sys
ctypes.CDLL(sys.argv[1])  # its name is libcuda.so.1, so the library finds it instead of a driver
from k3jax.runtime import library
print(json.dumps({
    "version": library.driver_version(),
    "count": library.device_count(),
    "facts": dataclasses.asdict(library.device_facts(1)),
    "peers": library.peer_access(),
}))
try:
    library.device_facts(7)
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def fake_driver(tmp_path):
    """The recording driver of the C++ tests, built here."""
    path = tmp_path / "libcuda.so.1"
    source = REPOSITORY / "ffi" / "tests" / "fake_cuda.cc"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(source), "-o", str(path)], check=True)
    return path


def test_queries_report_what_the_driver_says(fake_driver):
    result = subprocess.run(
        [sys.executable, "-c", QUERY_FAKE, str(fake_driver)],
        cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    facts, message = map(json.loads, result.stdout.splitlines())
    assert facts["version"] == [13, 1]
    assert facts["count"] == 2
    assert facts["peers"] == [[True, True], [False, True]]
    assert facts["facts"] == {  # the fake answers 1000 + the number of the attribute asked for
        "name": "Fake GPU 1",
        "capability": [1075, 1076],
        "num_sms": 1016,
        "l2_bytes": 1038,
        "shared_bytes": 1097,
        "multicast_supported": True,
    }
    assert message.startswith("finding device 7 failed: CUDA_ERROR_FAKE (101")


def test_no_driver_is_a_named_error():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match=r"no NVIDIA driver: .*JAX_PLATFORMS=cpu"):
            library.device_count()
    else:
        pytest.skip("this machine has a driver")


def test_missing_library_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(k3jax.runtime, "__path__", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match=r"libk3jax_ffi.so is not in .*pip install \."):
        library.library_path()


def test_library_from_older_sources_is_named():
    with pytest.raises(RuntimeError, match=r"libk3jax_ffi.so has no k3jax_new, .*older sources"):
        library.symbol("k3jax_new")
