"""Compiling whole programs for GPUs that are not there, and reading what XLA made of them.

XLA compiles for CUDA from a description of the device (`tests/data/*.txtpb`), without driver or
GPU, as long as the CUDA plugin is installed (no CUDA libraries are needed). Each compile runs in a
process of its own, because XLA takes its dump folder from the environment.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Report:
    """What a compiled program holds.

    Attributes:
        hlo: the optimised module.
        thunks: (kind, enclosing command buffer or None) of each step, in order.
        temp_bytes: scratch memory of one device.
    """

    hlo: str
    thunks: tuple[tuple[str, int | None], ...]
    temp_bytes: int

    def command_buffers_of(self, kind: str) -> list[int | None]:
        """The command buffer in which each step of that kind sits."""
        return [buffer for step, buffer in self.thunks if step == kind]


def gpu_mesh(kind: str, num_devices: int, axis: str = "tp") -> Any:
    """A mesh of described devices; compiling for it needs the CUDA plugin."""
    from jax.experimental import topologies

    config = (DATA / f"{kind}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x1x{num_devices}"
    )
    return topologies.make_mesh(topology, (num_devices,), (axis,))


def compile_apart(build: Callable[..., Any], dump: Path, *args: Any) -> Report:
    """Calls `build(*args)`, which returns a lowered program, and compiles it, in a new process.

    Args:
        build: a function at the top of an importable module.
        dump: an empty folder.
        args: JSON values.

    Raises:
        RuntimeError: the process failed; the message ends with its last lines.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    }
    command = [sys.executable, "-m", "tests.device_free", build.__module__, build.__name__]
    result = subprocess.run(
        [*command, json.dumps(args)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    if result.returncode != 0:
        raise RuntimeError(result.stderr[-3000:])
    (hlo,) = dump.glob("*gpu_after_optimizations.txt")
    # Passes that change nothing, where there is too little for a command buffer, dump nothing.
    passed = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    thunks = next(passed, None) or next(dump.glob("*thunk_sequence.txt"))
    temp_bytes = int(result.stdout.splitlines()[-1])
    return Report(hlo.read_text(), tuple(_read_thunks(thunks.read_text())), temp_bytes)


def instructions(hlo: str, opcode: str) -> list[str]:
    """The lines of HLO text whose instruction is `opcode`, synchronous or started."""
    return re.findall(rf"^.* = \S.*? {opcode}(?:-start)?\(.*$", hlo, re.MULTILINE)


def result_bytes(line: str) -> int:
    """Bytes of the largest array that the instruction on a line of HLO text makes."""
    widths = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
    result = line.split(" = ", 1)[1].split("(", 1)[0] if "= (" not in line else line
    sizes = [0]
    for dtype, dims in re.findall(r"\b(\w+?)\[([\d,]*)\]", result):
        size = widths.get(dtype, 8)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        sizes.append(size)
    return max(sizes)


def _read_thunks(text: str):
    """Steps are one a line, indented below the command buffer that holds them."""
    buffer = None
    for line in text.splitlines():
        if match := re.match(r"( *)(\d+): (k\w+)", line):
            indent, number, kind = match.groups()
            if not indent:
                buffer = int(number) if kind == "kCommandBuffer" else None
            yield kind, buffer if indent else None


def _main(module: str, function: str, args: str) -> None:
    import importlib

    lowered = getattr(importlib.import_module(module), function)(*json.loads(args))
    print(lowered.compile().memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    _main(*sys.argv[1:])
