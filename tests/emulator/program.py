"""Running a `Program`, or one kernel's PTX, on NumPy arrays."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.program import Kept, KeptSpec, Launch, Operand, Program, Result, Workspace

from .device import Device, LaunchSpec
from .errors import LaunchError
from .flow import Code, compile_entry
from .memory import GlobalMemory
from .ops import load_all
from .parser import parse

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block may have on sm_90, sm_100 and sm_103."""


@lru_cache(maxsize=256)
def load(ptx: str, entry: str | None = None) -> Code:
    """Parses PTX and binds one kernel of it."""
    load_all()
    return compile_entry(parse(ptx), entry)


@dataclass
class Emulation:
    """What running a program left behind.

    Attributes:
        results: every result of the program, scratch included.
        written: for each result, which of its elements were written in full.
        operands: the operands afterwards (only mutable ones can differ).
        kept: the words of the program's kept memories afterwards, where its next run starts.
        device: counters and clocks.
    """

    results: list[np.ndarray]
    written: list[np.ndarray]
    operands: list[np.ndarray]
    kept: list[np.ndarray]
    device: Device = field(repr=False)


def emulate(
    program: Program,
    operands: Sequence[np.ndarray],
    arch: str = "sm_90a",
    **options,
) -> list[np.ndarray]:
    """Runs a program and returns its results without the scratch.

    Args:
        program: what one custom call does.
        operands: one array for each of `program.operands`.
        arch: architecture to compile the kernels for.
        options: see `run_program`.
    """
    results = run_program(program, operands, arch, **options).results
    return results[: len(results) - program.num_scratch]


def run_program(
    program: Program,
    operands: Sequence[np.ndarray],
    arch: str = "sm_90a",
    mutable: Sequence[int] = (),
    kept: Sequence[np.ndarray] | None = None,
    **options,
) -> Emulation:
    """Runs a program.

    Args:
        program: what one custom call does.
        operands: one array for each of `program.operands`.
        arch: architecture to compile the kernels for.
        mutable: operands that kernels may write.
        kept: what the run before left there (`Emulation.kept`), or None for the first run.
        options: see `Device`.
    """
    before = None if kept is None else [kept]
    return run_programs([program], [operands], arch, mutable, kept=before, **options)[0]


def run_programs(
    programs: Sequence[Program],
    operands: Sequence[Sequence[np.ndarray]],
    arch: str = "sm_90a",
    mutable: Sequence[int] = (),
    memory: GlobalMemory | None = None,
    workspaces: Sequence[Mapping[int, int]] | None = None,
    kept: Sequence[Sequence[np.ndarray]] | None = None,
    **options,
) -> list[Emulation]:
    """Runs one program a rank, all at the same time on one memory.

    Args:
        programs: one a rank.
        operands: the arrays of each rank.
        arch: architecture to compile the kernels for.
        mutable: operands that kernels may write.
        memory: global memory that may already hold arrays, such as workspaces.
        workspaces: for each rank, the address of each workspace slot.
        kept: for each rank, what the run before left there, or None for the first run.
        options: see `Device`.
    """
    memory = memory or GlobalMemory()
    specs, places = [], []
    for rank, (program, arrays) in enumerate(zip(programs, operands, strict=True)):
        before = kept[rank] if kept else [_filled(spec) for spec in program.kept]
        place = _allocate(memory, program, arrays, mutable, before)
        places.append(place)
        for number, launch in enumerate(program.launches):
            slots = workspaces[rank] if workspaces else {}
            specs.append(_spec(launch, arch, place, slots, rank, number))
    device = Device(memory, **options)
    device.run(specs)
    return [
        _collect(memory, program, place, device)
        for program, place in zip(programs, places, strict=True)
    ]


def _filled(spec: KeptSpec) -> np.ndarray:
    return np.full(spec.num_bytes // 4, spec.fill, np.uint32)


def _allocate(memory, program: Program, arrays, mutable, kept) -> dict[type, list[int]]:
    """Addresses of a program's operands, results and kept memories."""
    if len(arrays) != len(program.operands):
        raise LaunchError(
            f"{program.name} takes {len(program.operands)} operands, not {len(arrays)}"
        )
    operand_addresses = []
    for i, (array, spec) in enumerate(zip(arrays, program.operands, strict=True)):
        if array.shape != tuple(spec.shape) or array.dtype != spec.dtype:
            raise LaunchError(
                f"{program.name}: operand {i} is {array.dtype}{list(array.shape)}, "
                f"the program takes {spec.dtype}{list(spec.shape)}"
            )
        operand_addresses.append(memory.allocate(f"operand {i}", array, i in mutable))
    results = [
        memory.allocate(f"result {i}", spec.num_bytes) for i, spec in enumerate(program.results)
    ]
    keeps = []
    for i, (words, spec) in enumerate(zip(kept, program.kept, strict=True)):
        if words.nbytes != spec.num_bytes:
            raise LaunchError(f"{program.name}: {words.nbytes} bytes for kept memory {i}, {spec}")
        keeps.append(memory.allocate(f"kept memory {i}", words))
    return {Operand: operand_addresses, Result: results, Kept: keeps}


def _spec(launch: Launch, arch: str, place, workspaces, rank: int, number: int) -> LaunchSpec:
    kernel = launch.kernel
    compiled = compile_kernel(kernel, arch)
    code = load(compiled.ptx, compiled.entry)
    if code.module.target != arch:
        raise LaunchError(f"the PTX of {code.entry.name} is for {code.module.target}, not {arch}")
    values = []
    for value in launch.arguments:
        if isinstance(value, Operand | Result | Kept):
            value = place[type(value)][value.index] + value.offset
        elif isinstance(value, Workspace):
            if value.slot not in workspaces:
                raise LaunchError(f"the program needs workspace {value.slot}, which has no address")
            value = workspaces[value.slot] + value.offset
        values.append(value)
    return launch_spec(
        code,
        launch.grid,
        (kernel.threads, 1, 1),
        kernel.cluster,
        kernel.shared_bytes,
        values,
        overlaps_previous=launch.overlaps_previous,
        stream=rank,
        number=number,
    )


def launch_spec(code: Code, grid, block, cluster, shared_bytes: int, args, **more) -> LaunchSpec:
    """Encodes arguments and checks the launch against the kernel's own demands."""
    entry = code.entry
    if len(args) != len(entry.parameters):
        raise LaunchError(f"{entry.name} takes {len(entry.parameters)} arguments, not {len(args)}")
    grid, block, cluster = (tuple(int(v) for v in x) for x in (grid, block, cluster))
    required = entry.directives.get("reqntid")
    if required and block != (*required, 1, 1)[:3]:
        raise LaunchError(f"{entry.name} requires blocks of {required}, not {block}")
    required = entry.directives.get("reqnctapercluster")
    if required and cluster != (*required, 1, 1)[:3]:
        raise LaunchError(f"{entry.name} requires clusters of {required}, not {cluster}")
    if any(g < 1 or g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"a grid of {grid} is not made of whole clusters of {cluster}")
    if not 1 <= block[0] * block[1] * block[2] <= 1024:
        raise LaunchError(f"a block of {block} threads")
    values = {
        p.name: _encode(p.type, p.num_bytes, v) for p, v in zip(entry.parameters, args, strict=True)
    }
    spec = LaunchSpec(code, grid, block, cluster, shared_bytes, values, **more)
    if spec.total_shared > SHARED_LIMIT:
        raise LaunchError(f"{entry.name} asks for {spec.total_shared} bytes of shared memory")
    return spec


def _encode(kind: str, num_bytes: int, value) -> bytes:
    if isinstance(value, bytes):
        return value.ljust(num_bytes, b"\0")
    if kind in ("f32", "f64") or isinstance(value, float):
        return struct.pack("<f" if num_bytes == 4 else "<d", value)
    return int(value % (1 << 8 * num_bytes)).to_bytes(num_bytes, "little")


def _collect(memory, program: Program, place, device) -> Emulation:
    results, written = [], []
    for address, spec in zip(place[Result], program.results, strict=True):
        data, state = memory.contents(address, spec.num_bytes)
        results.append(data.view(spec.dtype).reshape(spec.shape))
        whole = state.reshape(-1, max(spec.dtype.itemsize, 1)).all(axis=1)
        written.append(whole.reshape(spec.shape))
    operands = [
        memory.contents(address, spec.num_bytes)[0].view(spec.dtype).reshape(spec.shape)
        for address, spec in zip(place[Operand], program.operands, strict=True)
    ]
    kept = [
        memory.contents(address, spec.num_bytes)[0].view(np.uint32)
        for address, spec in zip(place[Kept], program.kept, strict=True)
    ]
    return Emulation(results, written, operands, kept, device)


def run_kernel(
    ptx: str,
    entry: str | None,
    grid,
    block,
    cluster,
    shared_bytes: int,
    args: Sequence[object],
    memory: GlobalMemory,
    **options,
) -> Device:
    """Runs one kernel of a PTX module.

    Args:
        ptx: the module.
        entry: kernel name, or None if there is only one.
        grid, block, cluster: extents (x, y, z).
        shared_bytes: dynamic shared memory of a block.
        args: one number (or bytes) a parameter; addresses come from `memory.allocate`.
        memory: global memory, changed in place.
        options: see `Device`.
    """
    device = Device(memory, **options)
    device.run([launch_spec(load(ptx, entry), grid, block, cluster, shared_bytes, args)])
    return device
