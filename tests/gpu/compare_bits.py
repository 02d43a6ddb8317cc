"""The same programs on the card and in the emulator: equal bits, or within a stated distance.

    python -m tests.gpu.compare_bits record FILE     with the CuTe DSL, no GPU needed
    python -m tests.gpu.compare_bits compare FILE    with a GPU and NumPy

The file holds machine code, operands and the emulator's results. `test_bits.py` does the comparison
under pytest.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

ARCH = "sm_90a"
POISON = 0xA5


def record(path: Path) -> None:
    """Runs every case of `bit_programs` in the emulator and writes the file."""
    from tests.gpu.bit_programs import cases

    arrays, table = {}, []
    for name, program, operands, max_ulp in cases():
        table.append({"name": name, "max_ulp": max_ulp, **_encode(name, program, operands, arrays)})
        print(f"recorded {name}", flush=True)
    arrays["table"] = np.frombuffer(json.dumps(table).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def _encode(name, program, operands, arrays) -> dict:
    from k3jax.runtime.compile import compile_kernel
    from tests.emulator import emulate

    results = emulate(program, operands, ARCH)
    for kind, values in (("operand", operands), ("want", results)):
        for i, value in enumerate(values):
            arrays[f"{name}/{kind}{i}"] = np.frombuffer(
                np.ascontiguousarray(value).tobytes(), np.uint8
            )
    launches = []
    for i, launch in enumerate(program.launches):
        compiled = compile_kernel(launch.kernel, ARCH)
        arrays[f"{name}/cubin{i}"] = np.frombuffer(compiled.cubin, np.uint8)
        launches.append(
            {
                "entry": compiled.entry,
                "grid": launch.grid,
                "threads": launch.kernel.threads,
                "cluster": launch.kernel.cluster,
                "shared": launch.kernel.shared_bytes,
                "overlaps": launch.overlaps_previous,
                "arguments": [_encode_argument(a) for a in launch.arguments],
            }
        )
    return {
        "launches": launches,
        "results": [spec.num_bytes for spec in program.results],
        "formats": [spec.dtype.name for spec in program.results[: len(results)]],
    }


def _encode_argument(value):
    if isinstance(value, int | float):
        return [type(value).__name__, value]
    return [type(value).__name__.lower(), value.index, value.offset]


def compare(path: Path) -> list[str]:
    """Runs every recorded case on the card; returns a line for each and raises on a difference."""
    from tests.gpu.driver import Driver

    driver = Driver()
    with np.load(path) as arrays:
        table = json.loads(arrays["table"].tobytes())
        lines, failures = [], 0
        for case in table:
            line, good = _compare_case(driver, case, arrays)
            lines.append(line)
            failures += not good
            print(line, flush=True)
    if failures:
        raise AssertionError(f"{failures} of {len(table)} programs differ:\n" + "\n".join(lines))
    return lines


def _compare_case(driver, case, arrays):
    name = case["name"]
    operands = [
        driver.upload(arrays[f"{name}/operand{i}"])
        for i in range(sum(key.startswith(f"{name}/operand") for key in arrays))
    ]
    results = [driver.upload(np.full(n, POISON, np.uint8)) for n in case["results"]]
    for i, launch in enumerate(case["launches"]):
        function = driver.function(
            arrays[f"{name}/cubin{i}"].tobytes(), launch["entry"], launch["shared"]
        )
        arguments = [_decode_argument(a, operands, results) for a in launch["arguments"]]
        driver.launch(function, launch["grid"], launch["threads"], launch["cluster"],
                      launch["shared"], arguments, launch["overlaps"])  # fmt: skip
    differing = total = worst = 0
    for i, kind in enumerate(case["formats"]):
        got = driver.download(results[i], case["results"][i])
        distance = ulps(got, arrays[f"{name}/want{i}"], kind)
        differing += int((distance > 0).sum())
        worst = max(worst, int(distance.max(initial=0)))
        total += distance.size
    for address in (*operands, *results):
        driver.free(address)
    good = worst <= case["max_ulp"]
    line = f"{name}: {differing} of {total} values differ, at most {worst} ulp"
    return f"{line} (allowed {case['max_ulp']}): {'ok' if good else 'DIFFERS'}", good


def _decode_argument(value, operands, results) -> bytes:
    kind, *rest = value
    if kind == "int":
        return struct.pack("<i", rest[0])
    if kind == "float":
        return struct.pack("<f", rest[0])
    index, offset = rest
    return struct.pack("<Q", {"operand": operands, "result": results}[kind][index] + offset)


def ulps(got: np.ndarray, want: np.ndarray, kind: str) -> np.ndarray:
    """Distance of two byte arrays of one dtype, in units in the last place; equal bits give 0."""
    width = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}[kind]
    sign = 1 << (8 * width - 1)

    def ordered(data):
        bits = data.view(f"u{width}").astype(np.int64)
        return np.where(bits & sign, sign - bits, bits) if "float" in kind else bits

    return np.abs(ordered(got) - ordered(want))


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
