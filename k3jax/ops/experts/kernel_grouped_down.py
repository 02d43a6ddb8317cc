"""Down projection of many tokens on Hopper where a row tile's whole K fits shared memory.

As in `kernel_grouped`, weights are operand A of `wgmma`, from registers, and hidden values operand
B, from shared memory. Here the hidden values of a whole unit and whole row tiles of weights are in
shared memory at once, so that warpgroups need not march together, and a unit's hidden values are
read once.

Work. A quad is four row tiles of a unit, one a warp: 64 columns of the result. Block b takes units
b, b + grid, and so on, widest first; the units that are left when no whole round is, the narrowest,
are cut evenly by quads. A block's quads go to its warpgroups in turn, whatever unit they are of.

Roles. One thread copies the weights of quads into a ring of slots, as far ahead as it reaches. Its
first copies start before the launch before has ended: the unit table is older than that, but what
the first-level cache holds of it may be older still, so it is read past that cache. Three warps
gather the hidden values of an item, which is a block's part of a unit, into one of two buffers,
with the routes of its columns and what quads it has. They hand most of their registers to the warps
that dequantise and multiply.

Epilogue. A quad's rounded columns pass through the slot that held its weights, so that 128 bytes of
a route's row go to memory together. The second-level cache is asked to keep them for the sum,
rather than the weights that stream by.

Why it cannot hang. Every role walks the same quads in the same order. A slot is filled once the
four warps that read it have released it, a buffer once all compute warps have; they release both
without waiting for a later one. Blocks do not wait for each other, only for launches before.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts import kernel_wgmma as wgmma
from k3jax.ops.experts.kernel_chunks import zeros
from k3jax.ops.experts.kernel_grouped import (
    GATHER_ROWS,
    GATHER_WARPS,
    NARROW,
    RECORD_BYTES,
    WIDE,
    GroupedProduct,
    header_bytes,
    multiply_chunks,
)
from k3jax.ops.experts.packing import CHUNK_BYTES, ROW_TILE, chunk_groups
from k3jax.runtime.program import Kernel

QUAD = 4
"""Row tiles that a warpgroup multiplies at once, one a warp."""
QUAD_BYTES = 2 * QUAD * ROW_TILE
"""A quad's columns of a row of the result."""
BUFFERS = 2
"""Items whose hidden values are in shared memory."""
_ITEM_BYTES = 16
"""An item in shared memory: number of its width, first quad, quads, nothing."""


@dataclass(frozen=True)
class DownKernel(GroupedProduct, Kernel):
    """rows[route] = hidden values of the route times its expert's matrix.

    Attributes:
        num_tiles: row tiles of an expert's matrix, a multiple of 4.
        depth: K, a multiple of 64.
        num_blocks: grid.
        shape: how a block divides its registers.
        rounds: quads of each warpgroup whose weights are in shared memory.
    """

    rounds: int

    parameters = (
        ("hidden", "address"),
        ("weights", "address"),
        ("order", "address"),
        ("units", "address"),
        ("rows", "address"),
    )

    @property
    def quads(self) -> int:
        """Quads of a unit."""
        return self.num_tiles // QUAD

    @property
    def slots(self) -> int:
        """Quads whose weights are in shared memory.

        Each slot serves one warpgroup: who waits for a phase by its parity has seen the one before.
        """
        return self.rounds * self.shape.warpgroups

    @property
    def slot_bytes(self) -> int:
        """A quad's weights, and later its columns."""
        return max(QUAD * self.tile_bytes, self.widths[-1] * QUAD_BYTES)

    @property
    def buffer_bytes(self) -> int:
        """An item's hidden values."""
        return self.chunks * self.column_tile_bytes

    @property
    def slots_offset(self) -> int:
        """Shared memory of the slots, after the buffers."""
        return BUFFERS * self.buffer_bytes

    @property
    def barriers_offset(self) -> int:
        """Shared memory of the barriers of slots, then buffers."""
        return self.slots_offset + self.slots * self.slot_bytes

    @property
    def items_offset(self) -> int:
        """Shared memory of the items, each with its routes."""
        return self.barriers_offset + 16 * (self.slots + BUFFERS)

    @property
    def item_bytes(self) -> int:
        """An item and the routes of its columns."""
        return _ITEM_BYTES + 4 * self.widths[-1]

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.items_offset + BUFFERS * self.item_bytes

    @cute.kernel
    def device(self, hidden: Int64, weights: Int64, order: Int64, units: Int64, rows: Int64):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = ptx.kept(Uint32(cute.arch.get_dyn_smem(Uint32, alignment=1024).toint()))
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            self.init_barriers(shared)
        self.clear_columns(shared)
        cute.arch.sync_threads()
        if warp < self.compute_warps:
            cute.arch.setmaxregister_increase(self.shape.compute_registers)
            cute.arch.griddepcontrol_wait()
            self.compute(shared, rows, warp)
        else:
            cute.arch.setmaxregister_decrease(self.shape.service_registers)
            if warp == self.compute_warps:
                if cute.arch.lane_idx() == 0:
                    self.copy_weights(shared, weights, units)
            else:
                cute.arch.griddepcontrol_wait()
                self.gather(shared, hidden, order, units)

    @cute.jit
    def init_barriers(self, shared: Uint32):
        """Slots and buffers full and empty."""
        for slot in cutlass.range_constexpr(self.slots):
            ptx.barrier_init(self.full(shared, slot), 1)
            ptx.barrier_init_warps(self.empty(shared, slot), QUAD)
        for buffer in cutlass.range_constexpr(self.slots, self.slots + BUFFERS):
            ptx.barrier_init(self.full(shared, buffer), 32 * GATHER_WARPS)
            ptx.barrier_init_warps(self.empty(shared, buffer), self.compute_warps)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def clear_columns(self, shared: Uint32):
        """Zeros for all hidden values: columns past a unit's routes are multiplied and dropped."""
        thread, _, _ = cute.arch.thread_idx()
        for offset in cutlass.range(thread * 16, self.slots_offset, self.threads * 16):
            wgmma.clear_piece(shared + Uint32(offset))
        wgmma.show_to_matrix_unit()

    def slot(self, shared, index):
        """A quad's weights."""
        return shared + Uint32(self.slots_offset + index * self.slot_bytes)

    def full(self, shared, index):
        """Barrier: a slot's weights or, after those, a buffer's hidden values have landed."""
        return shared + Uint32(self.barriers_offset + index * 16)

    def empty(self, shared, index):
        """Barrier: those who read a slot or a buffer are done with it."""
        return self.full(shared, index) + Uint32(8)

    def item(self, shared, buffer):
        """Where the item of a buffer is, its routes after it."""
        return shared + Uint32(self.items_offset + buffer * self.item_bytes)

    @cute.jit
    def walk(self, num_units):
        """The block's share: whole units, items in all, first quad of the rest, its last one + 1.

        Quads of the rest are numbered over all units that no whole round takes.
        """
        block, _, _ = cute.arch.block_idx()
        whole = num_units // self.num_blocks
        rest = (num_units - whole * self.num_blocks) * self.quads
        first, end = rest * block // self.num_blocks, rest * (block + 1) // self.num_blocks
        items = whole
        if first < end:
            items += (end - 1) // self.quads - first // self.quads + 1
        return whole, items, first, end

    @cute.jit
    def place(self, walk, index):
        """Unit, first quad and quads of an item."""
        block, _, _ = cute.arch.block_idx()
        whole, _, first, end = walk
        unit, quad, count = block + index * self.num_blocks, Int32(0), Int32(self.quads)
        if index >= whole:
            unit = first // self.quads + index - whole
            start = cutlass.max(first, unit * self.quads)
            count = cutlass.min(end, (unit + 1) * self.quads) - start
            quad = start - unit * self.quads
            unit += whole * self.num_blocks
        return unit, quad, count

    def num_units(self, units) -> Int32:
        """Units in all."""
        last = len(self.widths) - 1
        return Int32(ptx.load_relaxed_4(units + 16 * (last // 4))[last % 4])

    def record(self, units, unit):
        """Where a unit stands in the table."""
        return units + header_bytes(self.widths) + Int64(unit) * RECORD_BYTES

    @cute.jit
    def copy_weights(self, shared: Uint32, weights: Int64, units: Int64):
        """The copying thread: a quad's weights lie together."""
        policy = ptx.evict_first_policy()
        slot, parity = Int32(0), Uint32(1)
        walk = self.walk(self.num_units(units))
        for index in cutlass.range(walk[1], unroll=1):
            unit, quad, count = self.place(walk, index)
            expert = Int32(ptx.load_relaxed_4(self.record(units, unit))[0])
            tile = Int64(expert) * self.num_tiles + quad * QUAD
            source = weights + tile * self.tile_bytes
            for _ in cutlass.range(count, unroll=1):
                full, num_bytes = self.full(shared, slot), Int32(QUAD * self.tile_bytes)
                ptx.barrier_wait(self.empty(shared, slot), parity)
                ptx.barrier_expect(full, num_bytes)
                ptx.bulk_copy(self.slot(shared, slot), source, num_bytes, full, policy)
                source += QUAD * self.tile_bytes
                slot += 1
                if slot == self.slots:
                    slot = Int32(0)
                    parity = parity ^ Uint32(1)

    @cute.jit
    def gather(self, shared: Uint32, hidden: Int64, order: Int64, units: Int64):
        """The gathering warps: a thread copies one piece of every 12th row of the unit."""
        thread, _, _ = cute.arch.thread_idx()
        member = thread - 32 * (self.compute_warps + 1)
        first_row, piece = member // wgmma.PIECES, member % wgmma.PIECES
        walk = self.walk(self.num_units(units))
        for index in cutlass.range(walk[1], unroll=1):
            unit, quad, quads = self.place(walk, index)
            _, first, count, _ = ptx.load_global_4(self.record(units, unit))
            first, count = Int32(first), Int32(count)
            buffer = self.wait_buffer(shared, index)
            tile = shared + Uint32(buffer * self.buffer_bytes)
            for row in cutlass.range(first_row, count, GATHER_ROWS, unroll=1):
                target = tile + Uint32(wgmma.swizzled_piece(row, piece))
                source = hidden + Int64(first + row) * (2 * self.depth) + Int64(piece * 16)
                for chunk in cutlass.range_constexpr(self.chunks):
                    wgmma.copy_piece(
                        target + Uint32(chunk * self.column_tile_bytes),
                        source + chunk * wgmma.ROW_BYTES,
                    )
            wgmma.commit_copies()
            item = self.item(shared, buffer)
            self.keep_routes(item, order, member, first, count)
            if member == 0:
                ptx.store_shared_4(item, (self.width_number(count), quad, quads, Int32(0)))
            wgmma.wait_copies(0)
            wgmma.show_to_matrix_unit()
            ptx.barrier_arrive(self.full(shared, self.slots + buffer))
        buffer = self.wait_buffer(shared, walk[1])
        if member == 0:
            end = (Int32(len(self.widths)), Int32(0), Int32(0), Int32(0))
            ptx.store_shared_4(self.item(shared, buffer), end)
        ptx.barrier_arrive(self.full(shared, self.slots + buffer))

    @cute.jit
    def wait_buffer(self, shared, index) -> Int32:
        """Waits until the buffer of an item has been released; the buffer."""
        buffer, turn = index % BUFFERS, index // BUFFERS
        empty = self.empty(shared, self.slots + buffer)
        ptx.barrier_wait(empty, Uint32(turn & 1) ^ Uint32(1))
        return buffer

    @cute.jit
    def keep_routes(self, item: Uint32, order, member, first, count):
        """Keeps the routes of the item's columns for the compute warps, -1 where there is none."""
        for column in cutlass.range(member, self.widths[-1], 32 * GATHER_WARPS, unroll=1):
            route = Int32(-1)
            if column < count:
                route = ptx.load_global(order + Int64(first + column) * 4)
            ptx.store_shared(item + Uint32(_ITEM_BYTES + column * 4), route)

    def width_number(self, count):
        """Which is the least of the widths that holds the routes."""
        return sum((Int32(count > width) for width in self.widths[:-1]), Int32(0))

    @cute.jit
    def compute(self, shared, rows, warp):
        """A compute warp.

        Each width has a loop of its own: the compiler keeps matrix instructions of several widths
        in flight only if no loop holds two of them.
        """
        # Slot and parity of its phase; buffer and parity; the next quad, counted from the item's
        # first; width number, first quad, quads.
        state = cute.make_rmem_tensor((8,), Int32)
        for index in cutlass.range_constexpr(8):
            state[index] = Int32(0)
        state[0] = warp // 4
        state[4] = warp // 4
        self.open_item(shared, state)
        while state[5] < len(self.widths):
            for number in cutlass.range_constexpr(len(self.widths)):
                while state[5] == number:
                    while state[4] < state[7]:
                        self.compute_quad(shared, state, warp, self.widths[number], rows)
                        state[4] = state[4] + self.shape.warpgroups
                    state[4] = state[4] - state[7]
                    self.next_item(shared, state)

    @cute.jit
    def open_item(self, shared, state):
        """Waits for the item in turn."""
        buffer = state[2]
        ptx.barrier_wait(self.full(shared, self.slots + buffer), Uint32(state[3]))
        item = ptx.load_shared_4(self.item(shared, buffer))
        for index in cutlass.range_constexpr(3):
            state[5 + index] = Int32(item[index])

    @cute.jit
    def next_item(self, shared, state):
        """Releases the item, and waits for the next one."""
        ptx.barrier_arrive_warp(self.empty(shared, self.slots + state[2]))
        state[2] = state[2] + 1
        if state[2] == BUFFERS:
            state[2] = Int32(0)
            state[3] = state[3] ^ 1
        self.open_item(shared, state)

    @cute.jit
    def compute_quad(self, shared, state, warp, width: cutlass.Constexpr, rows):
        """64 rows of the matrix by this warp's warpgroup, of which the warp holds 16."""
        sums = zeros(width // 2, Float32)
        slot, buffer = state[0], state[2]
        ptx.barrier_wait(self.full(shared, slot), Uint32(state[1]))
        weights = self.slot(shared, slot) + Uint32(warp % 4 * self.tile_bytes)
        tokens = shared + Uint32(buffer * self.buffer_bytes)
        chunk = 0
        for size in chunk_groups(self.chunks):
            group, columns = chunk * CHUNK_BYTES, chunk * self.column_tile_bytes
            multiply_chunks(
                weights + Uint32(group),
                tokens + Uint32(columns),
                size,
                self.shape.step(width),
                chunk > 0,
                self.column_tile_bytes,
                width,
                sums,
            )
            chunk += size
        wgmma.wait_groups(0)
        routes = self.item(shared, buffer) + Uint32(_ITEM_BYTES)
        target = rows + Int64((state[6] + state[4]) * QUAD_BYTES)
        self.store(sums, width, self.slot(shared, slot), routes, target)
        ptx.barrier_arrive_warp(self.empty(shared, slot))
        state[0] = state[0] + self.shape.warpgroups
        if state[0] >= self.slots:
            state[0] = state[0] - self.slots
            state[1] = state[1] ^ 1

    @cute.jit
    def store(self, sums, width: cutlass.Constexpr, stage: Uint32, routes: Uint32, target: Int64):
        """Rounds the warpgroup's 64 columns of each route, and stores them to the routes' rows.

        They are staged in shared memory, whose weights have been read. Word w of a route's columns
        stands at w ^ (8 (r / 2 % 4)) for column r of the unit: no bank is met twice.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = wgmma.lane_here()
        member = thread % 128
        g, t = lane // 4, lane % 4
        self.meet()
        word = stage + Uint32(((member // 32 * 8 + g) ^ (8 * t)) * 4 + 2 * t * QUAD_BYTES)
        for index in cutlass.range_constexpr(width // 8):
            for side in cutlass.range_constexpr(2):
                pair = ptx.round_pair(sums[4 * index + side], sums[4 * index + side + 2])
                ptx.store_shared(word + Uint32((8 * index + side) * QUAD_BYTES), pair)
        wgmma.show_to_matrix_unit()
        self.meet()
        row, piece = member // 8, member % 8
        source = stage + Uint32(row * QUAD_BYTES + ((4 * piece) ^ (row // 2 % 4 * 8)) * 4)
        for step in cutlass.range_constexpr(-(-width // 16)):
            if row + 16 * step < width:
                route = ptx.load_shared(routes + Uint32((row + 16 * step) * 4))
                if route >= 0:
                    words = ptx.load_shared_4(source + Uint32(16 * step * QUAD_BYTES))
                    place = Int64(route) * (2 * self.num_tiles * ROW_TILE) + piece * 16
                    ptx.store_hinted_words(target + place, words, ptx.evict_last_policy())

    def meet(self):
        """The warps of a warpgroup wait for each other."""
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.barrier(barrier_id=1 + thread // 128, number_of_threads=128)


REPRESENTATIVES = {
    f"grouped, whole down, {name}, TP=8": DownKernel(
        num_tiles=224, depth=384, num_blocks=132, shape=shape, rounds=2
    )
    for name, shape in (("narrow", NARROW), ("wide", WIDE))
}
