"""Routed experts of many tokens on Hopper: one grouped matrix product, for gate/up and for down.

Down has a kernel of its own where its K is small (`kernel_grouped_down`); this one takes any.

Weights are operand A of `wgmma`, from registers: a warp dequantises 16 rows exactly as the decode
kernel does, so one copy of the packed weights serves both. Tokens are operand B, from shared
memory, their K permuted beforehand as the packing permutes that of the weights. A weight is
dequantised once for all tokens of a unit: at most `widths[-1]` routes of one expert.

Work. An item is some row tiles (16 or 24: one a compute warp) of one unit over all of K; block b
takes items b, b + grid, and so on, widest units first. Items of a unit are neighbours, so that its
tokens, and the weights of an expert with several units, are read from memory once and from L2
after. Sums of a route depend on nothing but its token and expert: a column of the matrix
instruction knows nothing of the others.

Roles. The warps of four or six warpgroups compute: dequantising is most of the work, and many warps
hide its latencies better than few with more rows. One warp copies weights, three gather the rows of
the unit's tokens, both into a ring whose stages are 256 of K (less where K ends), as far ahead as
it reaches, over the borders of items. They hand most of their registers to the compute warps.

A compute warp dequantises the next 128 of K (64 for the widest units, for want of registers) once
the matrix instructions that read the same registers have ended; meanwhile others dequantise. It
releases a stage when its last matrix instruction has ended, before it waits for the next one.

Epilogue. Gate/up: rows g and g + 8 of a tile are gate and up of one neuron, in one thread; SiTU,
and the hidden values go to global memory in the permuted order that the second product reads. Down:
rows go to global memory, to the place of their route. What the epilogue needs of a unit, its
columns' routes or their place and number, is left in shared memory before the item's first stage is
announced: loading it then would take as long as a stage.

Why it cannot hang. Every role walks the same items in the same order, and the ring's writers wait
only for stages that its readers release without waiting for a later one. The gathering warps
announce a stage once the next is on its way, or before they wait for room for it. Blocks do not
wait for each other, only for the end of the launch before. They let the next launch start after
that, so that it finds what earlier ones left, the unit table, before it waits itself.
"""

import math
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts import kernel_wgmma as wgmma
from k3jax.ops.experts.kernel_chunks import zeros
from k3jax.ops.experts.packing import (
    CHUNK,
    CHUNK_BYTES,
    ELEMENT_BYTES,
    GROUP_CHUNKS,
    ROW_TILE,
    chunk_groups,
)
from k3jax.runtime.program import Kernel


@dataclass(frozen=True)
class Shape:
    """How a block divides its registers.

    Attributes:
        warpgroups: of compute warps.
        widths: columns that a unit is computed with, ascending multiples of 8; a unit takes the
            least that holds its routes.
        widest_of_two: columns up to which a thread has registers for two chunks of weights.
        compute_registers: of a thread of the compute warps.
        service_registers: of a thread of the others, which give theirs away.
    """

    warpgroups: int
    widths: tuple[int, ...]
    widest_of_two: int
    compute_registers: int
    service_registers: int

    def step(self, width: int) -> int:
        """Chunks of K that are dequantised at once."""
        return 2 if width <= self.widest_of_two else 1


NARROW = Shape(6, (8, 16, 24, 32, 40, 48), 40, 80, 24)
"""Many warps, which hide each other's latencies: for few routes an expert."""
WIDE = Shape(4, (8, 16, 24, 32, 40, 48, 64, 80), 80, 104, 64)
"""Many columns, so that a weight is dequantised once for more tokens."""
RECORD_BYTES = 16
"""A unit in the table: expert, first place among the sorted routes, routes, nothing."""

GATHER_WARPS = 3
GATHER_ROWS = 32 * GATHER_WARPS // wgmma.PIECES
"""Rows that the gathering warps copy a piece of at once."""


def header_bytes(widths: tuple[int, ...]) -> int:
    """Before the units, which come by descending width: how many have one of the widest 1, 2 ..."""
    return -(-len(widths) // 4) * 16


@dataclass(frozen=True)
class GroupedProduct:
    """What both kernels of a grouped product have: their warps, and tiles of operands.

    Attributes:
        num_tiles: row tiles of an expert's matrix.
        depth: K, a multiple of 64.
        num_blocks: grid.
        shape: how a block divides its registers.
    """

    num_tiles: int
    depth: int
    num_blocks: int
    shape: Shape

    architectures = ("sm_90a",)
    min_blocks = 1

    @property
    def threads(self) -> int:
        """Compute warps, one that copies, and those that gather."""
        return 32 * (self.compute_warps + 1 + GATHER_WARPS)

    @property
    def compute_warps(self) -> int:
        """Warps that dequantise and multiply, a row tile each."""
        return 4 * self.shape.warpgroups

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that units are computed with."""
        return self.shape.widths

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return self.num_blocks, 1, 1

    @property
    def chunks(self) -> int:
        """Times 64 of K."""
        return self.depth // CHUNK

    @property
    def tile_bytes(self) -> int:
        """A row tile of the packed weights."""
        return self.chunks * CHUNK_BYTES

    @property
    def column_tile_bytes(self) -> int:
        """A chunk of tokens or hidden values."""
        return self.widths[-1] * wgmma.ROW_BYTES


@dataclass(frozen=True)
class GroupedKernel(GroupedProduct, Kernel):
    """out[place] = unit's rows times one of the expert's matrices, both products of the experts.

    Attributes:
        down: the second product: rows are hidden values in sorted order, `out` is [routes, L] by
            route. Otherwise the first, with SiTU: rows are tokens, `out` is hidden values.
        num_tiles: row tiles of an expert's matrix, a multiple of 8.
        depth: K, a multiple of 64.
        top_k: slots a token.
        num_blocks: grid; blocks take items in turn.
        shape: how a block divides its registers.
        stages: of the ring.
        beta: soft cap of the gate.
        linear_beta: soft cap of the linear branch, or None.
    """

    down: bool
    top_k: int
    stages: int
    beta: float
    linear_beta: float | None

    parameters = (
        ("rows", "address"),
        ("weights", "address"),
        ("order", "address"),
        ("units", "address"),
        ("out", "address"),
    )

    @property
    def parts(self) -> int:
        """Items of a unit."""
        return -(-self.num_tiles // self.compute_warps)

    @property
    def groups(self) -> tuple[int, ...]:
        """Chunks of each stage of an item."""
        return chunk_groups(self.chunks)

    @property
    def weights_offset(self) -> int:
        """A stage's weights, after its tokens."""
        return self.groups[0] * self.column_tile_bytes

    @property
    def slot_bytes(self) -> int:
        """A stage, which begins where a tile of tokens may."""
        weights = self.compute_warps * self.groups[0] * CHUNK_BYTES
        return -(-(self.weights_offset + weights) // 1024) * 1024

    @property
    def barriers_offset(self) -> int:
        """Shared memory of the barriers, after the ring."""
        return self.stages * self.slot_bytes

    @property
    def units_offset(self) -> int:
        """Shared memory of the units of the items in flight, after the barriers."""
        return self.barriers_offset + 16 * self.stages

    @property
    def unit_bytes(self) -> int:
        """A unit: the routes of its columns, or its first place and how many they are."""
        return 4 * self.widths[-1] if self.down else 8

    @property
    def unit_slots(self) -> int:
        """Items in flight: while a warp stores one, the gathering warps may be at the last."""
        return 2 + self.stages // len(self.groups)

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.units_offset + self.unit_slots * self.unit_bytes

    @cute.kernel
    def device(self, rows: Int64, weights: Int64, order: Int64, units: Int64, out: Int64):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = ptx.kept(Uint32(cute.arch.get_dyn_smem(Uint32, alignment=1024).toint()))
        if thread == 0:
            self.init_barriers(shared)
        self.clear_columns(shared)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < self.compute_warps:
            cute.arch.setmaxregister_increase(self.shape.compute_registers)
            self.compute(shared, units, out, warp)
        else:
            cute.arch.setmaxregister_decrease(self.shape.service_registers)
            num_items = self.end_of_class(units, len(self.widths) - 1)
            if warp == self.compute_warps:
                self.copy_weights(shared, weights, units, num_items)
            else:
                self.gather(shared, rows, order, units, num_items)

    @cute.jit
    def init_barriers(self, shared: Uint32):
        """Stages full and empty."""
        for slot in cutlass.range_constexpr(self.stages):
            ptx.barrier_init(self.full(shared, slot), 1 + 32 * GATHER_WARPS)
            ptx.barrier_init_warps(self.empty(shared, slot), self.compute_warps)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_columns(self, shared: Uint32):
        """Zeros for all tokens: columns past a unit's routes are multiplied and dropped."""
        thread, _, _ = cute.arch.thread_idx()
        for slot in cutlass.range_constexpr(self.stages):
            tokens = self.slot(shared, slot)
            for offset in cutlass.range(thread * 16, self.weights_offset, self.threads * 16):
                wgmma.clear_piece(tokens + Uint32(offset))
        wgmma.show_to_matrix_unit()

    def slot(self, shared, index):
        """A stage of the ring."""
        return shared + Uint32(index * self.slot_bytes)

    def full(self, shared, index):
        """Barrier: the stage's weights and tokens have landed."""
        return shared + Uint32(self.barriers_offset + index * 16)

    def empty(self, shared, index):
        """Barrier: every compute warp is done with the stage."""
        return self.full(shared, index) + Uint32(8)

    def record(self, units, item):
        """Expert, first place and routes of an item's unit."""
        address = units + header_bytes(self.widths) + Int64(item // self.parts) * RECORD_BYTES
        expert, first, count, _ = ptx.load_global_4(address)
        return Int32(expert), Int32(first), Int32(count)

    def part_tiles(self, item):
        """First row tile of an item, and how many it has.

        Every so often parts take other places in their unit: a block meets the same places again
        and again, and the last part may be small.
        """
        period = math.lcm(self.num_blocks, self.parts)
        first = (item + item // period) % self.parts * self.compute_warps
        return first, cutlass.min(self.compute_warps, self.num_tiles - first)

    @cute.jit
    def copy_weights(self, shared: Uint32, weights: Int64, units: Int64, num_items: Int32):
        """The copying warp: one lane starts the copies of all row tiles of an item."""
        block, _, _ = cute.arch.block_idx()
        policy = ptx.evict_first_policy()
        stage, slot = Int32(0), Int32(0)
        for item in cutlass.range(block, num_items, self.num_blocks):
            expert, place, count = self.record(units, item)
            if cutlass.const_expr(not self.down):
                self.keep_place(self.unit_of(shared, slot), place, count)
                slot = self.next_unit(slot)
            first, tiles = self.part_tiles(item)
            # What is known to be the same for all lanes needs no loop over them at every copy.
            tile = cute.arch.make_warp_uniform(expert * self.num_tiles + first)
            source = weights + Int64(tile) * self.tile_bytes
            whole = self.chunks // GROUP_CHUNKS
            for _ in cutlass.range(whole):
                self.copy_group(shared, source, tiles, stage, GROUP_CHUNKS, policy)
                source += GROUP_CHUNKS * CHUNK_BYTES
                stage += 1
            for size in self.groups[whole:]:
                self.copy_group(shared, source, tiles, stage, size, policy)
                source += size * CHUNK_BYTES
                stage += 1

    @cute.jit
    def copy_group(self, shared, source, tiles, stage, size: cutlass.Constexpr, policy):
        """Starts the copies of a stage once it has been released."""
        lane = cute.arch.lane_idx()
        slot = self.wait_empty(shared, stage)
        full = self.full(shared, slot)
        num_bytes = size * CHUNK_BYTES
        target = self.slot(shared, slot) + Uint32(self.weights_offset)
        if lane == 0:
            ptx.barrier_expect(full, tiles * num_bytes)
            for tile in cutlass.range_constexpr(self.compute_warps):
                if tile < tiles:
                    ptx.bulk_copy(
                        target + Uint32(tile * num_bytes),
                        source + tile * self.tile_bytes,
                        Int32(num_bytes),
                        full,
                        policy,
                    )

    @cute.jit
    def wait_empty(self, shared, stage) -> Int32:
        """Waits until a stage's slot has been released; the slot."""
        slot, turn = stage % self.stages, stage // self.stages
        ptx.barrier_wait(self.empty(shared, slot), Uint32(turn & 1) ^ Uint32(1))
        return slot

    @cute.jit
    def gather(self, shared: Uint32, rows: Int64, order: Int64, units: Int64, num_items: Int32):
        """The gathering warps: a thread copies one piece of every 12th row of the unit."""
        block, _, _ = cute.arch.block_idx()
        first_row, piece = self.gather_place()
        steps = -(-self.widths[-1] // GATHER_ROWS)
        offsets = cute.make_rmem_tensor((steps,), Int32)
        ring = cute.make_rmem_tensor((3,), Int32)  # slot, parity, whether the last is unannounced
        for index in cutlass.range_constexpr(3):
            ring[index] = Int32(0)
        slot = Int32(0)
        for item in cutlass.range(block, num_items, self.num_blocks):
            _, first, count = self.record(units, item)
            for step in cutlass.range_constexpr(steps):
                row = first_row + step * GATHER_ROWS
                offsets[step] = self.row_offset(order, first, row, count)
                if cutlass.const_expr(self.down):
                    self.keep_route(self.unit_of(shared, slot), order, first, row, count)
            if cutlass.const_expr(self.down):
                slot = self.next_unit(slot)
            source = rows + Int64(piece * 16)
            whole = self.chunks // GROUP_CHUNKS
            for _ in cutlass.range(whole):
                self.gather_group(shared, source, offsets, ring, GROUP_CHUNKS)
                source += GROUP_CHUNKS * wgmma.ROW_BYTES
            for size in self.groups[whole:]:
                self.gather_group(shared, source, offsets, ring, size)
                source += size * wgmma.ROW_BYTES
        self.announce_previous(shared, ring, 0)

    @cute.jit
    def keep_route(self, routes: Uint32, order, first, row, count):
        """Keeps the route of a unit's column, -1 where there is none, for the compute warps."""
        _, piece = self.gather_place()
        if (piece == 0) & (row < self.widths[-1]):
            route = Int32(-1)
            if row < count:
                route = ptx.load_global(order + Int64(first + row) * 4)
            ptx.store_shared(routes + Uint32(row * 4), route)

    @cute.jit
    def keep_place(self, unit: Uint32, first, count):
        """Keeps a unit's first place and number of routes for the compute warps."""
        if cute.arch.lane_idx() == 0:
            ptx.store_shared(unit, first)
            ptx.store_shared(unit + Uint32(4), count)

    def unit_of(self, shared, slot):
        """Where an item's unit is: the routes of its columns, or its place and routes."""
        return shared + Uint32(self.units_offset + slot * self.unit_bytes)

    @cute.jit
    def next_unit(self, slot: Int32) -> Int32:
        """The slot of the next item's unit."""
        slot += 1
        if slot == self.unit_slots:
            slot = Int32(0)
        return slot

    def gather_place(self):
        """First row and piece of a gathering thread."""
        thread, _, _ = cute.arch.thread_idx()
        index = thread - 32 * (self.compute_warps + 1)
        return index // wgmma.PIECES, index % wgmma.PIECES

    @cute.jit
    def row_offset(self, order, first, row, count) -> Int32:
        """Where the row of a unit's column begins, in bytes; -1 where there is none."""
        offset = Int32(-1)
        if row < count:
            place = first + row
            if cutlass.const_expr(not self.down):
                place = ptx.load_global(order + Int64(place) * 4) // self.top_k
            offset = place * (2 * self.depth)
        return offset

    @cute.jit
    def gather_group(self, shared, source: Int64, offsets, ring, size: cutlass.Constexpr):
        """Starts the copies of a stage, as one group; announces the stage before.

        At once if nothing can be started meanwhile, otherwise when its copies have had that time.
        """
        empty, parity = self.empty(shared, ring[0]), Uint32(ring[1] ^ 1)
        if ptx.barrier_test(empty, parity) == Uint32(0):
            self.announce_previous(shared, ring, 0)
            ptx.barrier_wait(empty, parity)
        tile = self.slot(shared, ring[0])
        first_row, piece = self.gather_place()
        for step in cutlass.range_constexpr(offsets.shape[0]):
            if offsets[step] >= 0:
                place = wgmma.swizzled_piece(first_row + step * GATHER_ROWS, piece)
                target, row = tile + Uint32(place), source + Int64(offsets[step])
                for chunk in cutlass.range_constexpr(size):
                    wgmma.copy_piece(
                        target + Uint32(chunk * self.column_tile_bytes),
                        row + chunk * wgmma.ROW_BYTES,
                    )
        wgmma.commit_copies()
        self.announce_previous(shared, ring, 1)
        ring[2] = Int32(1)
        self.advance(ring)

    @cute.jit
    def announce_previous(self, shared, ring, pending: cutlass.Constexpr):
        """Says that a thread's part of the stage before has landed, if it has not said so.

        `pending` groups of copies were started after that stage's.
        """
        if ring[2] == 1:
            wgmma.wait_copies(pending)
            wgmma.show_to_matrix_unit()
            ptx.barrier_arrive(self.full(shared, self.previous(ring)))
            ring[2] = Int32(0)

    @cute.jit
    def compute(self, shared, units, out, warp):
        """A compute warp, which has a tile of each item.

        Units come by descending width, and each width has a loop of its own: the compiler keeps
        matrix instructions of several widths in flight only if no loop holds two of them.
        """
        block, _, _ = cute.arch.block_idx()
        ring = cute.make_rmem_tensor((3,), Int32)  # slot, parity of its phase, slot of the unit
        for index in cutlass.range_constexpr(3):
            ring[index] = Int32(0)
        item = block
        next_end = self.end_of_class(units, 0)
        for index in cutlass.range_constexpr(len(self.widths)):
            end = next_end
            if cutlass.const_expr(index + 1 < len(self.widths)):
                next_end = self.end_of_class(units, index + 1)
            while item < end:
                _, tiles = self.part_tiles(item)
                if warp < tiles:
                    width = self.widths[-1 - index]
                    self.compute_item(shared, ring, warp, width, (out, item))
                else:
                    self.skip_item(shared, ring)
                ring[2] = self.next_unit(ring[2])
                item += self.num_blocks

    def end_of_class(self, units, index):
        """Items of the units of the widest `index` + 1 widths."""
        return ptx.load_global(units + 4 * index) * self.parts

    @cute.jit
    def skip_item(self, shared, ring):
        """A warp without tiles releases every stage of the item when it has landed."""
        for _ in cutlass.range(len(self.groups), unroll=1):
            ptx.barrier_wait(self.full(shared, ring[0]), Uint32(ring[1]))
            ptx.barrier_arrive_warp(self.empty(shared, ring[0]))
            self.advance(ring)

    @cute.jit
    def advance(self, ring: cute.Tensor):
        """The next stage, and the parity of its phase."""
        ring[0] = ring[0] + 1
        if ring[0] == self.stages:
            ring[0] = Int32(0)
            ring[1] = ring[1] ^ 1

    @cute.jit
    def compute_item(self, shared, ring, tile, width: cutlass.Constexpr, memory):
        """64 rows of the item by this warp's warpgroup, of which the warp holds 16."""
        sums = zeros(width // 2, Float32)
        whole = self.chunks // GROUP_CHUNKS
        for _ in cutlass.range(whole):
            self.multiply_group(shared, ring, tile, GROUP_CHUNKS, width, sums)
        for size in self.groups[whole:]:
            self.multiply_group(shared, ring, tile, size, width, sums)
        self.store_item(sums, tile, width, self.unit_of(shared, ring[2]), memory)

    @cute.jit
    def previous(self, ring) -> Int32:
        """The slot before the one in turn."""
        slot = ring[0] - 1
        if slot < 0:
            slot = Int32(self.stages - 1)
        return slot

    @cute.jit
    def multiply_group(
        self, shared, ring, tile, size: cutlass.Constexpr, width: cutlass.Constexpr, sums
    ):
        """A stage."""
        ptx.barrier_wait(self.full(shared, ring[0]), Uint32(ring[1]))
        slot = self.slot(shared, ring[0])
        weights = slot + Uint32(self.weights_offset + tile * (size * CHUNK_BYTES))
        step = self.shape.step(width)
        multiply_chunks(weights, slot, size, step, False, self.column_tile_bytes, width, sums)
        wgmma.wait_groups(0)
        ptx.barrier_arrive_warp(self.empty(shared, ring[0]))
        self.advance(ring)

    @cute.jit
    def store_item(self, sums, tile, width: cutlass.Constexpr, unit, memory):
        """The warp's tile of an item, eight columns at a time."""
        out, item = memory
        first, count = Int32(0), Int32(width)
        if cutlass.const_expr(not self.down):
            first, count = [Int32(word) for word in ptx.load_shared_2(unit)]
        part, _ = self.part_tiles(item)
        for index in cutlass.range_constexpr(width // 8):
            eight = [sums[4 * index + value] for value in range(4)]
            if cutlass.const_expr(self.down):
                self.store_rows(eight, unit + Uint32(32 * index), out, part + tile)
            elif 8 * index < count:
                self.store_hidden(eight, out, part + tile, 8 * index, first, count)

    @cute.jit
    def store_hidden(self, sums, out, tile, column, first, count):
        """SiTU of a tile's 8 neurons, stored in the order of K that the second product reads.

        Neighbouring rows g, g + 1 swap halves, so that each lane stores two neurons of one column.
        """
        lane = wgmma.lane_here()
        g, t = lane // 4, lane % 4
        gates, ups = ptx.round_pair(sums[0], sums[1]), ptx.round_pair(sums[2], sums[3])
        low = ptx.situ(ptx.low_float(gates), ptx.low_float(ups), self.beta, self.linear_beta)
        high = ptx.situ(ptx.high_float(gates), ptx.high_float(ups), self.beta, self.linear_beta)
        pair = ptx.round_pair(low, high)
        word = _neighbours(pair, cute.arch.shuffle_sync_bfly(pair, 4), g % 2)
        column = column + 2 * t + g % 2
        place = tile // 8 * wgmma.ROW_BYTES + tile % 2 * 64 + tile % 8 // 2 * 4 + g // 2 * 16
        if column < count:
            row = out + Int64(first + column) * (2 * self.num_tiles * 8)
            ptx.store_global(row + Int64(place), word)

    @cute.jit
    def store_rows(self, sums, routes, out, tile):
        """Rounds eight columns of the tile and stores them to the rows of the routes."""
        lane = wgmma.lane_here()
        pair = ptx.load_shared_2(routes + Uint32(lane % 4 * 8))
        place = Int64(tile * (2 * ROW_TILE) + lane // 4 * 4)
        for side in cutlass.range_constexpr(2):
            route = Int32(pair[side])
            if route >= 0:
                row = out + Int64(route) * (2 * self.num_tiles * ROW_TILE)
                ptx.store_global(row + place, ptx.round_pair(sums[side], sums[side + 2]))


@cute.jit
def multiply_chunks(
    weights: Uint32,
    columns: Uint32,
    size: cutlass.Constexpr,
    step: cutlass.Constexpr,
    busy: cutlass.Constexpr,
    tile_bytes: cutlass.Constexpr,
    width: cutlass.Constexpr,
    sums: cute.Tensor,
):
    """Adds a warp's row tile of a group of chunks times `width` columns to its sums.

    Args:
        weights: the group of packed weights in shared memory.
        columns: the first chunk of the columns, from which each is `tile_bytes` to the next.
        size: chunks of the group.
        step: chunks that are dequantised at once.
        busy: whether matrix instructions may be under way at first; at last they are.
        tile_bytes: from a chunk of columns to the next one.
        width: columns.
        sums: width / 2 float32.
    """
    lane = cute.arch.lane_idx()
    scales = ptx.load_scales(weights + Uint32(size * ELEMENT_BYTES + lane // 2 * (2 * size)), size)
    large = _some_large(scales)
    first_scales = _first_scales(scales, large)
    for first in cutlass.range_constexpr(0, size, step):
        chunks = min(step, size - first)
        if cutlass.const_expr(busy or first > 0):
            wgmma.wait_groups(0)
        words = [
            word
            for chunk in range(first, first + chunks)
            for word in ptx.load_shared_4(weights + Uint32(chunk * ELEMENT_BYTES + lane * 16))
        ]
        a = cute.make_rmem_tensor((16 * chunks,), Uint32)
        _dequantize(words, scales, first_scales, first, large, a)
        done = wgmma.multiply(
            [sums[i] for i in range(width // 2)],
            [a[i] for i in range(16 * chunks)],
            wgmma.tile_descriptor(columns + Uint32(first * tile_bytes)),
            tile_bytes,
        )
        for i in cutlass.range_constexpr(width // 2):
            sums[i] = done[i]


def _some_large(scales):
    """Whether a scale byte of the warp is 128 or more."""
    every = scales[0]
    for word in scales[1:]:
        every = every | word
    return cute.arch.vote_any_sync((every & Uint32(0x80808080)) != Uint32(0))


@cute.jit
def _first_scales(scales, large) -> cute.Tensor:
    """The scales that codes are multiplied by first: where some are large, all are 2^0."""
    first = cute.make_rmem_tensor((len(scales),), Uint32)
    for index in cutlass.range_constexpr(len(scales)):
        first[index] = scales[index]
        if large:
            first[index] = Uint32(0x7F7F7F7F)
    return first


@cute.jit
def _dequantize(words, scales, first_scales, first: cutlass.Constexpr, large, a: cute.Tensor):
    """A lane's K of its two rows, chunks `first` on, as operand A of four instructions a chunk.

    2^126 times a scale whose byte is 128 or more is past bfloat16, and takes a second multiply.
    """
    bytes_ = [2 * first + pair for pair in range(a.shape[0] // 8)]
    factors = [ptx.power_of_byte(first_scales, byte) for byte in bytes_]
    for index, value in enumerate(_values(words, factors)):
        a[index] = value
    if large:
        for index in cutlass.range_constexpr(a.shape[0]):
            pair = ptx.scale_byte(scales, bytes_[index // 16 * 2 + index % 2])
            a[index] = ptx.scale_pair(a[index], ptx.scale_value(pair))


def _values(words, factors):
    """Registers of operand A: row g, row g + 8, alternately, chunk after chunk."""
    rows = [
        [value for word in words[2 * pair : 2 * pair + 2] for value in ptx.dequantize(word, factor)]
        for pair, factor in enumerate(factors)
    ]
    return [
        value
        for chunk in range(0, len(rows), 2)
        for both in zip(*rows[chunk : chunk + 2], strict=True)
        for value in both
    ]


@cute.jit
def _neighbours(pair: Uint32, other: Uint32, odd):
    """Of two neurons' pairs of columns, the pair of neurons of one column."""
    word = wgmma.pick_halves(pair, other, 0)
    if odd == 1:
        word = wgmma.pick_halves(other, pair, 1)
    return word


REPRESENTATIVES = {
    f"grouped {'down' if down else 'gate/up'}, {name}, TP=8": GroupedKernel(
        down=down,
        num_tiles=224 if down else 48,
        depth=384 if down else 3584,
        top_k=16,
        num_blocks=132,
        shape=shape,
        stages=3,
        beta=4.0,
        linear_beta=25.0,
    )
    for down in (False, True)
    for name, shape in (("narrow", NARROW), ("wide", WIDE))
}
