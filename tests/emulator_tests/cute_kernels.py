"""Small CuTe kernels for the emulator's own tests; `fault` plants one mistake.

Each shows one way in which the library's kernels work: a ring of bulk copies, matrix tiles,
distributed shared memory, dependent launches, blocks that wait for each other.
"""

from dataclasses import dataclass

import cutlass
import numpy as np
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.runtime.program import ArraySpec, Kernel, Launch, Operand, Program, Result


def _ptx(text, types=(), *arguments):
    return cute.arch.inline_ptx(text, write_only_types=list(types), read_only_args=list(arguments))


def load(address):
    return _ptx("ld.global.f32 {$w0}, [{$r0}];", [Float32], address)


def store(address, value):
    _ptx("st.global.f32 [{$r0}], {$r1};", (), address, value)


def load_shared(address):
    return _ptx("ld.shared.f32 {$w0}, [{$r0}];", [Float32], address)


def store_shared(address, value):
    _ptx("st.shared.f32 [{$r0}], {$r1};", (), address, value)


def shared_base():
    return Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())


@cute.jit
def wait(barrier: Uint32, parity: Uint32):
    done = Uint32(0)
    while done == Uint32(0):
        done = _ptx(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; "
            "selp.u32 {$w0}, 1, 0, p; }",
            [Uint32],
            barrier,
            parity,
        )


def arrive(barrier):
    _ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", (), barrier)


def floats(*shape) -> ArraySpec:
    return ArraySpec(shape, np.dtype(np.float32))


@dataclass(frozen=True)
class ScaleKernel(Kernel):
    """y = scale * x + 1."""

    fault: str = ""
    threads: int = 128
    parameters = (("x", "address"), ("y", "address"), ("n", "int32"), ("scale", "float32"))

    @cute.kernel
    def device(self, x: Int64, y: Int64, n: Int32, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        limit = n + 1 if cutlass.const_expr(self.fault == "one too many") else n
        if i < limit:
            store(y + Int64(i) * 4, load(x + Int64(i) * 4) * scale + Float32(1.0))


def scale_program(n: int, scale: float, fault: str = "") -> Program:
    kernel = ScaleKernel(fault)
    launch = Launch(kernel, (-(-(n + 1) // 128), 1, 1), (Operand(0), Result(0), n, scale))
    return Program("scale", (launch,), (floats(n),), (floats(n),))


@dataclass(frozen=True)
class SumKernel(Kernel):
    """Sum of 256 numbers a block: shuffles, then shared memory."""

    fault: str = ""
    threads: int = 256
    shared_bytes: int = 128
    parameters = (("x", "address"), ("y", "address"))

    @cute.kernel
    def device(self, x: Int64, y: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = shared_base()
        value = load(x + Int64(block * self.threads + thread) * 4)
        for level in cutlass.range_constexpr(5):
            value = value + cute.arch.shuffle_sync_bfly(value, offset=16 >> level)
        if thread % 32 == 0:
            store_shared(shared + Uint32(thread // 32 * 4), value)
        if cutlass.const_expr(self.fault != "missing barrier"):
            cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for warp in cutlass.range_constexpr(8):
                total = total + load_shared(shared + Uint32(warp * 4))
            store(y + Int64(block) * 4, total)


def sum_program(blocks: int, fault: str = "") -> Program:
    launch = Launch(SumKernel(fault), (blocks, 1, 1), (Operand(0), Result(0)))
    return Program("sum", (launch,), (floats(blocks, 256),), (floats(blocks),))


@dataclass(frozen=True)
class RingKernel(Kernel):
    """Column sums of tiles that a producer warp copies into a ring; two consumer warps."""

    tiles: int
    stages: int
    fault: str = ""
    threads: int = 96
    parameters = (("x", "address"), ("y", "address"))

    @property
    def shared_bytes(self) -> int:
        return 128 + self.stages * 256

    @cute.kernel
    def device(self, x: Int64, y: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = shared_base()
        if thread == 0:
            for stage in cutlass.range_constexpr(self.stages):
                full, empty = shared + Uint32(stage * 16), shared + Uint32(stage * 16 + 8)
                _ptx("mbarrier.init.shared::cta.b64 [{$r0}], 1;", (), full)
                _ptx("mbarrier.init.shared::cta.b64 [{$r0}], 64;", (), empty)
        cute.arch.sync_threads()
        x = x + Int64(block) * (self.tiles * 256)
        if thread < 32:
            if thread == 0:
                self.produce(x, shared)
        else:
            self.consume(y + Int64(block) * 256, shared, thread - 32)

    @cute.jit
    def produce(self, x: Int64, shared: Uint32):
        for tile in cutlass.range(self.tiles):
            full, empty, slot = self.place(shared, tile)
            if cutlass.const_expr(self.fault != "no wait for the slot"):
                wait(empty, Uint32(tile // self.stages & 1) ^ Uint32(1))
            _ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], 256;", (), full)
            _ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], 256, [{$r2}];",
                (),
                slot,
                x + Int64(tile) * 256,
                full,
            )

    @cute.jit
    def consume(self, y: Int64, shared: Uint32, column: Int32):
        total = Float32(0.0)
        for tile in cutlass.range(self.tiles):
            full, empty, slot = self.place(shared, tile)
            if cutlass.const_expr(self.fault != "no wait for the data"):
                wait(full, Uint32(tile // self.stages & 1))
            total = total + load_shared(slot + Uint32(column * 4))
            if cutlass.const_expr(self.fault != "no release"):
                arrive(empty)
        store(y + Int64(column) * 4, total)

    @cute.jit
    def place(self, shared: Uint32, tile: Int32):
        stage = tile % self.stages
        full = shared + Uint32(stage * 16)
        return full, full + Uint32(8), shared + Uint32(128 + stage * 256)


def ring_program(blocks: int, tiles: int, stages: int, fault: str = "") -> Program:
    launch = Launch(RingKernel(tiles, stages, fault), (blocks, 1, 1), (Operand(0), Result(0)))
    return Program("ring", (launch,), (floats(blocks, tiles, 64),), (floats(blocks, 64),))


@dataclass(frozen=True)
class TileKernel(Kernel):
    """D = A B^T, [16, K] times [8, K] of bf16, one warp, fragments straight from memory."""

    depth: int
    fault: str = ""
    threads: int = 32
    parameters = (("a", "address"), ("b", "address"), ("d", "address"))

    @cute.kernel
    def device(self, a: Int64, b: Int64, d: Int64):
        lane, _, _ = cute.arch.thread_idx()
        row, quad = lane // 4, lane % 4
        zero = Float32(0.0)
        sums = (zero, zero, zero, zero)
        for step in cutlass.range_constexpr(self.depth // 16):
            k = step * 32
            place = Int64(row) * (self.depth * 2) + k + quad * 4
            sums = self.multiply(a + place, b + place, sums)
        at = d + Int64(row * 8 + quad * 2) * 4
        for half in cutlass.range_constexpr(2):
            store(at + half * 256, sums[2 * half])
            store(at + half * 256 + 4, sums[2 * half + 1])

    @cute.jit
    def multiply(self, a: Int64, b: Int64, sums):
        word = lambda at: _ptx("ld.global.b32 {$w0}, [{$r0}];", [Uint32], at)  # noqa: E731
        below = self.depth * 16
        left = [word(at) for at in (a, a + below, a + 16, a + below + 16)]
        right = [word(b), word(b + 16)]
        if cutlass.const_expr(self.fault == "wrong layout"):
            right.reverse()
        return _ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            [Float32] * 4,
            *left,
            *right,
            *sums,
        )


def tile_program(depth: int, bf16: np.dtype, fault: str = "") -> Program:
    launch = Launch(TileKernel(depth, fault), (1, 1, 1), (Operand(0), Operand(1), Result(0)))
    operands = (ArraySpec((16, depth), bf16), ArraySpec((8, depth), bf16))
    return Program("tile", (launch,), operands, (floats(16, 8),))


@dataclass(frozen=True)
class RotateKernel(Kernel):
    """Each block of a cluster writes the row of its neighbour, read from its shared memory."""

    blocks: int
    fault: str = ""
    threads: int = 32
    shared_bytes: int = 128
    parameters = (("x", "address"), ("y", "address"))

    @property
    def cluster(self) -> tuple[int, int, int]:
        return self.blocks, 1, 1

    @cute.kernel
    def device(self, x: Int64, y: Int64):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = shared_base()
        place = Int64(block * 32 + lane) * 4
        store_shared(shared + Uint32(lane * 4), load(x + place))
        if cutlass.const_expr(self.fault != "missing cluster barrier"):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        value = _ptx(
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; "
            "ld.shared::cluster.f32 {$w0}, [a]; }",
            [Float32],
            shared + Uint32(lane * 4),
            Uint32((block + 1) % self.blocks),
        )
        store(y + place, value)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def rotate_program(clusters: int, blocks: int, fault: str = "") -> Program:
    kernel = RotateKernel(blocks, fault)
    launch = Launch(kernel, (clusters * blocks, 1, 1), (Operand(0), Result(0)))
    shape = floats(clusters, blocks, 32)
    return Program("rotate", (launch,), (shape,), (shape,))


@dataclass(frozen=True)
class StepKernel(Kernel):
    """y = x / 2 + 1, as one link of a chain of dependent launches."""

    fault: str = ""
    threads: int = 64
    parameters = (("x", "address"), ("y", "address"))

    @cute.kernel
    def device(self, x: Int64, y: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.fault != "no wait"):
            cute.arch.griddepcontrol_wait()
        place = Int64(block * self.threads + thread) * 4
        store(y + place, load(x + place) * Float32(0.5) + Float32(1.0))


def chain_program(blocks: int, links: int, fault: str = "") -> Program:
    kernel = StepKernel(fault)
    places = [Operand(0), *(Result(links - 1 - i) for i in range(links))]
    launches = tuple(
        Launch(kernel, (blocks, 1, 1), (places[i], places[i + 1]), overlaps_previous=i > 0)
        for i in range(links)
    )
    shape = floats(blocks, 64)
    return Program("chain", launches, (shape,), (shape,) * links, num_scratch=links - 1)


@dataclass(frozen=True)
class TurnsKernel(Kernel):
    """Running sums over blocks: each waits for the flag of the block before it."""

    fault: str = ""
    threads: int = 32
    parameters = (("x", "address"), ("y", "address"), ("flags", "address"))

    @cute.kernel
    def device(self, x: Int64, y: Int64, flags: Int64):
        lane, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        value = load(x + Int64(block * 32 + lane) * 4)
        if block > 0:
            before = block if cutlass.const_expr(self.fault == "wrong flag") else block - 1
            ready = Uint32(0)
            while ready == Uint32(0):
                ready = _ptx(
                    "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", [Uint32], flags + Int64(before) * 4
                )
            value = value + load(y + Int64((block - 1) * 32 + lane) * 4)
        store(y + Int64(block * 32 + lane) * 4, value)
        cute.arch.sync_warp()
        if lane == 0:
            _ptx("st.release.gpu.global.b32 [{$r0}], 1;", (), flags + Int64(block) * 4)


@dataclass(frozen=True)
class ClearKernel(Kernel):
    """Zeros a word a thread."""

    threads: int = 32
    parameters = (("flags", "address"),)

    @cute.kernel
    def device(self, flags: Int64):
        thread, _, _ = cute.arch.thread_idx()
        store(flags + Int64(thread) * 4, Float32(0.0))


def turns_program(blocks: int, fault: str = "") -> Program:
    launches = (
        Launch(ClearKernel(), (1, 1, 1), (Result(1),)),
        Launch(TurnsKernel(fault), (blocks, 1, 1), (Operand(0), Result(0), Result(1))),
    )
    shape = floats(blocks, 32)
    return Program("turns", launches, (shape,), (shape, floats(32)), num_scratch=1)
