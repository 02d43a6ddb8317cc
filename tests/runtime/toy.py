"""Small vector kernels that the runtime's tests launch, and their programs."""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Float32, Int64, Uint32

from k3jax.runtime.program import (
    ArraySpec,
    Kept,
    KeptSpec,
    Kernel,
    Launch,
    Operand,
    Program,
    Result,
)


@dataclass(frozen=True)
class Scale(Kernel):
    """y[i] = factor * x[i] + shift for i < count; waits for the launch before it."""

    shift: float = 0.0
    threads: int = 128
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)

    parameters: ClassVar = (
        ("x", "address"),
        ("y", "address"),
        ("count", "int32"),
        ("factor", "float32"),
    )

    @cute.kernel
    def device(self, x: Int64, y: Int64, count: cutlass.Int32, factor: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.inline_ptx("griddepcontrol.wait;")
        i = block * self.threads + thread
        if i < count:
            value = cute.arch.inline_ptx(
                "ld.global.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[x + Int64(i) * 4],
            )
            cute.arch.inline_ptx(
                "st.global.f32 [{$r0}], {$r1};",
                read_only_args=[y + Int64(i) * 4, value * factor + Float32(self.shift)],
            )
        cute.arch.inline_ptx("griddepcontrol.launch_dependents;")


@dataclass(frozen=True)
class Spilling(Kernel):
    """y[i] = sum of x[i, k] * x[i, 127 - k]: more live values than 1,024 threads have registers."""

    threads: int = 1024

    parameters: ClassVar = (("x", "address"), ("y", "address"))

    @cute.kernel
    def device(self, x: Int64, y: Int64):
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor((128,), Float32)
        for k in cutlass.range_constexpr(32):
            for part in cutlass.range_constexpr(4):
                values[4 * k + part] = cute.arch.inline_ptx(
                    "ld.volatile.global.f32 {$w0}, [{$r0}];",
                    write_only_types=[Float32],
                    read_only_args=[x + Int64(thread) * 512 + (4 * k + part) * 4],
                )
        total = Float32(0.0)
        for k in cutlass.range_constexpr(32):
            total = total + values[k] * values[127 - k]
            total = total + values[32 + k] * values[95 - k]
        cute.arch.inline_ptx(
            "st.global.f32 [{$r0}], {$r1};", read_only_args=[y + Int64(thread) * 4, total]
        )


@dataclass(frozen=True)
class AddTally(Kernel):
    """y[i] = x[i] + the tally, a word, for i < count."""

    threads: int = 128

    parameters: ClassVar = (
        ("x", "address"),
        ("y", "address"),
        ("tally", "address"),
        ("count", "int32"),
    )

    @cute.kernel
    def device(self, x: Int64, y: Int64, tally: Int64, count: cutlass.Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < count:
            value = cute.arch.inline_ptx(
                "ld.global.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[x + Int64(i) * 4],
            )
            runs = cute.arch.inline_ptx(
                "ld.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[tally]
            )
            cute.arch.inline_ptx(
                "st.global.f32 [{$r0}], {$r1};",
                read_only_args=[y + Int64(i) * 4, value + Float32(runs)],
            )
        cute.arch.inline_ptx("griddepcontrol.launch_dependents;")


@dataclass(frozen=True)
class CountRun(Kernel):
    """Adds one to the tally, after the launch before."""

    threads: int = 32

    parameters: ClassVar = (("tally", "address"),)

    @cute.kernel
    def device(self, tally: Int64):
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.inline_ptx("griddepcontrol.wait;")
        if thread == 0:
            runs = cute.arch.inline_ptx(
                "ld.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[tally]
            )
            cute.arch.inline_ptx(
                "st.global.u32 [{$r0}], {$r1};", read_only_args=[tally, runs + Uint32(1)]
            )


def scale_program(count: int, factor: float, kernel: Scale | None = None) -> Program:
    """One launch: y = factor * x + shift."""
    kernel = kernel or Scale()
    spec = ArraySpec((count,), np.dtype(np.float32))
    grid = (-(-count // kernel.threads), 1, 1)
    launch = Launch(kernel, grid, (Operand(0), Result(0), count, factor))
    return Program("scale", (launch,), (spec,), (spec,))


def chain_program(count: int, first: float, second: float) -> Program:
    """Two launches, the second overlapping the first: y = second * (first * x) + 1."""
    spec = ArraySpec((count,), np.dtype(np.float32))
    grid = (-(-count // 128), 1, 1)
    return Program(
        "chain",
        (
            Launch(Scale(), grid, (Operand(0), Result(1), count, first)),
            Launch(
                Scale(shift=1.0),
                grid,
                (Result(1), Result(0), count, second),
                overlaps_previous=True,
            ),
        ),
        (spec,),
        (spec, spec),
        num_scratch=1,
    )


def tally_program(count: int, fill: int) -> Program:
    """y = x + fill + the runs of this call before; what is kept shows, so it has a side effect."""
    spec = ArraySpec((count,), np.dtype(np.float32))
    tally = Kept(1, 8)
    return Program(
        "tally",
        (
            Launch(AddTally(), (-(-count // 128), 1, 1), (Operand(0), Result(0), tally, count)),
            Launch(CountRun(), (1, 1, 1), (tally,), overlaps_previous=True),
        ),
        (spec,),
        (spec,),
        kept=(KeptSpec(4), KeptSpec(16, fill)),
    )
