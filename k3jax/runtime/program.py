"""What one custom call does on the device: a chain of kernel launches on one stream, as data.

A `Program` is the single description that every consumer reads: `runtime.ffi` lowers it to one XLA
custom call, `runtime.compile` compiles the kernels in it, the tests' PTX emulator executes it on
NumPy arrays, and `k3jax kernels` prints what its machine code holds. It imports neither jax nor the
CuTe DSL.

A kernel is a frozen dataclass of static facts deriving from `Kernel`; its `device` method is the
CuTe DSL device code. Device code sees 64-bit addresses and scalars only, never tensor objects, so
that the parameter block of the compiled code is exactly `Kernel.parameters` and anyone can launch
it: XLA's stream, a debugger's harness, or the emulator.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

ParameterType = Literal["address", "int32", "float32"]

MAX_KEPT_BYTES = 1 << 30


class Kernel:
    """Base of all kernels: subclass it as a frozen dataclass whose fields are compile-time facts.

    Two kernels compile to the same code if and only if their class and fields are equal.

    Attributes:
        parameters: (name, type) of each parameter of `device`, in order.
        threads: threads in a block.
        cluster: blocks in a cluster, (x, y, z).
        shared_bytes: bytes of dynamic shared memory of a block.
        architectures: those whose instructions it needs, or None if it compiles for all.
        min_blocks: blocks that a multiprocessor must be able to hold. 1 fixes the registers that a
            thread starts with, which `setmaxnreg` asks for; 0 leaves them to the compiler.
    """

    parameters: ClassVar[tuple[tuple[str, ParameterType], ...]]
    threads: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    architectures: ClassVar[tuple[str, ...] | None] = None
    min_blocks: ClassVar[int] = 0
    device: Any
    """The `@cute.kernel` method: `device(self, *parameters)`."""

    def compiles_for(self, arch: str) -> bool:
        """Whether `arch` has the instructions that the kernel needs."""
        return self.architectures is None or arch in self.architectures


@dataclass(frozen=True)
class Operand:
    """The device address of the custom call's operand `index`, `offset` bytes in."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Result:
    """The device address of the custom call's result `index`, `offset` bytes in."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class Workspace:
    """Memory of the device that outlives the program, `offset` bytes in.

    The native library holds one address a slot and device; whoever allocates a workspace registers
    it there, before the program runs.
    """

    slot: int
    offset: int = 0


@dataclass(frozen=True)
class Kept:
    """The device address of the program's kept memory `index`, `offset` bytes in."""

    index: int
    offset: int = 0


Argument = Operand | Result | Workspace | Kept | int | float
ADDRESSES = (Operand, Result, Workspace, Kept)


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a program.

    Attributes:
        kernel: what to launch.
        grid: blocks, (x, y, z).
        arguments: one value for each of `kernel.parameters`.
        overlaps_previous: launch with programmatic stream serialisation: blocks may start once
            every block of the previous launch has triggered or exited, and must execute
            `griddepcontrol.wait` before they touch what that launch writes.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    overlaps_previous: bool = False

    def __post_init__(self) -> None:
        """Checks the arguments against the kernel's parameters."""
        names = [name for name, _ in self.kernel.parameters]
        if len(names) != len(self.arguments):
            raise TypeError(
                f"{type(self.kernel).__name__} takes {len(names)} arguments {names}, "
                f"got {len(self.arguments)}"
            )
        for (name, kind), value in zip(self.kernel.parameters, self.arguments, strict=True):
            wanted = {"address": ADDRESSES, "int32": int, "float32": float}[kind]
            if not isinstance(value, wanted):
                raise TypeError(
                    f"{type(self.kernel).__name__}: parameter {name!r} is {kind}, got {value!r}"
                )


@dataclass(frozen=True)
class ArraySpec:
    """Shape and NumPy dtype of an operand or result; row-major and contiguous."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the array in device memory."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KeptSpec:
    """Device memory that a custom call keeps from one of its runs to the next.

    It belongs to one call site of one loaded executable on one device, and to nothing else: XLA
    never touches it, and other calls of the same program, other executables and other devices have
    memory of their own. It is filled before the first run and freed with the executable. Its
    address never changes, so a run replayed as a CUDA graph meets it too.

    Runs of a call on one device never overlap, so a kernel may leave there what the next run
    starts from: XLA puts all runs on the device's one compute stream, and whoever issues the
    launches of a run, from whatever thread, issues all of them before another run's first. The
    first launch of such a program therefore may not overlap the previous one. Between launches of
    one run the rules are those of any memory: an overlapping launch waits with
    `griddepcontrol.wait` for what the launch before it writes.

    A call in a loop meets its own memory in every round; where XLA copies a call, as it does when
    it unrolls a loop, each copy has its own. XLA may also drop a call, run it once for several
    equal ones or hoist it from a loop, unless it has a side effect: so what is kept must not show
    in the results of a call without one. A run that fails leaves it as it is.

    Attributes:
        num_bytes: how much; a multiple of 4, at most `MAX_KEPT_BYTES`.
        fill: the 32-bit word, unsigned, that fills it before the first run.
    """

    num_bytes: int
    fill: int = 0

    def __post_init__(self) -> None:
        """Checks that whole words fill it."""
        if not 0 < self.num_bytes <= MAX_KEPT_BYTES or self.num_bytes % 4:
            raise ValueError(
                f"{self}: num_bytes must be a multiple of 4, more than 0, up to {MAX_KEPT_BYTES}"
            )
        if not 0 <= self.fill < 1 << 32:
            raise ValueError(f"{self}: fill must be an unsigned 32-bit word")


@dataclass(frozen=True)
class Program:
    """One custom call.

    Attributes:
        name: shown in profiles, errors and HLO.
        launches: in stream order.
        operands: what the call reads.
        results: what the call writes, scratch last. Results start with undefined contents.
        num_scratch: how many trailing results are scratch, dropped by the caller.
        kept: memory that outlives the call's runs.
    """

    name: str
    launches: tuple[Launch, ...]
    operands: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]
    num_scratch: int = 0
    kept: tuple[KeptSpec, ...] = ()

    def __post_init__(self) -> None:
        """Checks that addresses lie inside their memory and that runs with state do not overlap."""
        places = {Operand: self.operands, Result: self.results, Kept: self.kept}
        for launch in self.launches:
            for value in launch.arguments:
                if isinstance(value, Operand | Result | Kept):
                    known = places[type(value)]
                    if not 0 <= value.index < len(known):
                        raise ValueError(f"{self.name}: {value} but there are {len(known)}")
                    if not 0 <= value.offset <= known[value.index].num_bytes:
                        raise ValueError(f"{self.name}: {value} lies outside {known[value.index]}")
        if self.kept and self.launches[0].overlaps_previous:
            raise ValueError(
                f"{self.name}: its first launch overlaps what runs before it, which may be its own "
                "previous run, so it cannot keep memory; launch it with overlaps_previous=False"
            )
