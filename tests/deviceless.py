"""Compiling whole programs for GPUs that are not here: XLA's compiler needs only a description.

Needs the CUDA plugin's wheels without their CUDA dependencies; `make test` installs them.
"""

import functools
import importlib.util
import re
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies

DATA = Path(__file__).parent / "data"


@functools.cache
def mesh_of(kind: str, num_devices: int) -> jax.sharding.Mesh:
    """A mesh of `num_devices` GPUs of one host; skips the test where the plugin is missing."""
    if importlib.util.find_spec("jax_plugins") is None:
        pytest.skip("jax-cuda13-plugin and jax-cuda13-pjrt are not installed")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(DATA / f"{kind}.txtpb").read_text(),
        topology=f"1x1x{num_devices}",
    )
    return topologies.make_mesh(topology, (num_devices,), ("tp",))


def instructions(text: str, opcode: str) -> list[str]:
    """The HLO lines of compiled `text` whose instruction is `opcode`, sync or async."""
    return re.findall(rf"^.* = \S.*? {opcode}(?:-start)?\(.*$", text, re.MULTILINE)


def result_bytes(line: str) -> int:
    """Bytes of the largest array that the instruction on `line` makes."""
    widths = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
    result = line.split(" = ", 1)[1].split("(", 1)[0] if "= (" not in line else line
    sizes = [0]
    for dtype, dims in re.findall(r"\b(\w+?)\[([\d,]*)\]", result):
        size = widths.get(dtype, 8)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        sizes.append(size)
    return max(sizes)
