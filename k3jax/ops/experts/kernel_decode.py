"""Routed experts of a few tokens: gate/up, SiTU, down, weighted sum in one persistent kernel.

Decode is bound by the bytes of the experts' weights, so everything serves one stream of them. One
block runs on each multiprocessor; a block has L / 256 compute warps (14 for K3), a service warp and
a copying warp.

Units. Routes (token, slot) are grouped into units of at most 8 routes of one expert: the 8 columns
of a matrix instruction whose 16 rows are weights. Up to 128 routes every block groups them itself
(all blocks alike); more are grouped by the launch before.

Weights. The copying warp fills a ring of shared-memory slots with packed weights, in the order in
which the block consumes them: first its share of the gate/up row tiles of all units, then its share
of down. It runs ahead as far as the ring reaches, so down weights are there before gate/up is done;
but it starts a copy only when all but the last `window` - 1 of those before it have landed. That
many keep the memory busy. More would only stand in line: weights would land out of order, gate/up
behind down, and every load of tokens or hidden values behind all of them. Shares: down rows are cut
evenly over the blocks, each block taking its row tiles of ALL units; gate/up tiles are cut
contiguously, so that gate/up and down bytes together are even.

Gate/up. A row tile is 8 gate and the 8 matching up rows over all of L. Compute warp w owns
k = 256 w .. 256 w + 255 and holds the tokens' share of these as operand B in registers for as long
as the unit lasts, so shared memory carries nothing but weights. The warps' partial sums meet in
shared memory, where the service warp adds them in warp order, applies SiTU and stores the hidden
values to global memory. That all sums of a tile are there also says that its ring slot has been
read: the service warp hands it back. Sums of a route depend on nothing but its token and expert.

Down. All warps but the copying one take jobs of a unit's one or two row tiles (K is short). A warp
loads the hidden values of the unit's routes straight into registers as operand B. They may still be
on their way from another block: they were words 0xFFFFFFFF before, which no rounded pair of bf16
can be, and the warp loads again until none is left. Since a block holds its rows of all units, it
also holds all slots of each token for these rows, and adds them in slot order: in shared memory, or
where they do not fit, out of global memory after a barrier of the block.

Not written. Where routes are many, the launch before fills the hidden values with these words. Up
to 128 routes there is none: the program keeps memory for the hidden values of two runs. A run takes
the place that the run before left, and fills the other, whose values nobody reads any more, for the
run after. Which is which, each block counts for itself in a word of that memory; since every run is
over before the next begins, all blocks agree.

Why it cannot hang. The copying warp waits for copies that it has started and for slots that have
been read, a gate/up tile by the compute warps, a slot of down by all warps but itself. All take the
same sequence of slots. Gate/up of a block waits for nothing outside the block. Down waits only for
gate/up of this grid's blocks, which are all resident at once: one block a multiprocessor, no more
blocks than multiprocessors (a kernel that shares the device delays a block, but ends).
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_chunks import multiply_group, zeros
from k3jax.ops.experts.kernel_units import (
    BLOCK_TABLE_BYTES,
    GAINS_OFFSET,
    MAX_BLOCK_ROUTES,
    ROUTES_OFFSET,
    UNIT,
    count_units,
    group_block,
    record_offset,
)
from k3jax.ops.experts.packing import (
    CHUNK,
    CHUNK_BYTES,
    GROUP_CHUNKS,
    GROUP_SIZE,
    NEURONS,
    ROW_TILE,
    chunk_groups,
)
from k3jax.runtime.program import Kernel

MAX_BATCH = 8
"""Most chunks of hidden values that fit a lane's registers."""

_PARTIAL_BYTES = UNIT * ROW_TILE * 4
"""A warp's sums: 8 columns of 16 rows."""
HEADER_BYTES = 256
"""Shared memory of the barriers."""
_CUT_BITS = 20
"""Fraction bits of a block's share of a unit's gate/up tiles."""


@dataclass(frozen=True)
class DecodeKernel(Kernel):
    """sum over slots of weights[t, s] * expert(z[t], ids[t, s]), or the unweighted rows.

    `hidden` is kept memory of `kept_bytes` if the kernel groups by itself, else scratch that an
    earlier launch has filled.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        latent: L, a multiple of 256.
        inner: I of this rank, a multiple of 64.
        top_k: slots a token.
        max_tokens: most tokens of a launch.
        num_blocks: grid; at most the device's multiprocessors.
        stages: slots of the weight ring.
        window: slots whose copies are on their way at a time, at most `stages`.
        beta: soft cap of the gate.
        linear_beta: soft cap of the linear branch, or None.
        weighted: write the weighted sum [T, L] rather than rows [T, top_k, L].
        keeps_rows: the rows of that sum stay in shared memory; otherwise they go through `rows`.
    """

    num_experts: int
    latent: int
    inner: int
    top_k: int
    max_tokens: int
    num_blocks: int
    stages: int
    window: int
    beta: float
    linear_beta: float | None
    weighted: bool
    keeps_rows: bool

    parameters = (
        ("z", "address"),
        ("ids", "address"),
        ("weights", "address"),
        ("gate_up", "address"),
        ("down", "address"),
        ("hidden", "address"),
        ("units", "address"),
        ("rows", "address"),
        ("out", "address"),
        ("num_tokens", "int32"),
    )

    @property
    def warps(self) -> int:
        """Compute warps."""
        return self.latent // GROUP_SIZE

    @property
    def threads(self) -> int:
        """Compute warps, the service warp and the copying warp."""
        return 32 * (self.warps + 2)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return self.num_blocks, 1, 1

    @property
    def groups_itself(self) -> bool:
        """Whether the blocks group the routes, rather than an earlier launch."""
        return self.max_tokens * self.top_k <= min(MAX_BLOCK_ROUTES, self.threads)

    @property
    def gate_up_tiles(self) -> int:
        """Gate/up row tiles of an expert."""
        return self.inner // NEURONS

    @property
    def down_tiles(self) -> int:
        """Down row tiles of an expert."""
        return self.latent // ROW_TILE

    @property
    def block_down_tiles(self) -> int:
        """Most down row tiles of a block."""
        return -(-self.down_tiles // self.num_blocks)

    @property
    def slot_bytes(self) -> int:
        """A ring slot: one gate/up row tile."""
        return self.latent // CHUNK * CHUNK_BYTES

    @property
    def down_bytes(self) -> int:
        """A down row tile."""
        return self.inner // CHUNK * CHUNK_BYTES

    @property
    def slot_tiles(self) -> int:
        """Down row tiles that share a ring slot."""
        return min(self.slot_bytes // self.down_bytes, 32)

    @property
    def whole_jobs(self) -> bool:
        """Whether a down job may be all row tiles of the block, one or two, for a unit.

        Tiles of a job share the hidden values that the warp holds.
        """
        return self.block_down_tiles <= min(2, self.slot_tiles)

    @property
    def batch_chunks(self) -> int:
        """Chunks of a down tile whose hidden values a warp holds at a time."""
        chunks = self.inner // CHUNK
        return chunks if chunks <= MAX_BATCH else next(n for n in (8, 4) if chunks % n == 0)

    @property
    def batches(self) -> int:
        """Batches of a down tile."""
        return self.inner // CHUNK // self.batch_chunks

    @property
    def partials_offset(self) -> int:
        """Shared memory of the partial sums, two sets, after the unit tables."""
        return HEADER_BYTES + self.groups_itself * BLOCK_TABLE_BYTES

    @property
    def rows_offset(self) -> int:
        """Shared memory of the block's part of all rows, for the weighted sum."""
        return self.partials_offset + 2 * self.warps * _PARTIAL_BYTES

    @property
    def ring_offset(self) -> int:
        """Shared memory of the ring."""
        rows = self.max_tokens * self.top_k * self.block_down_tiles * 2 * ROW_TILE
        return -(-(self.rows_offset + rows * self.keeps_rows) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.ring_offset + self.stages * self.slot_bytes

    @cute.kernel
    def device(
        self,
        z: Int64,
        ids: Int64,
        weights: Int64,
        gate_up: Int64,
        down: Int64,
        hidden: Int64,
        units: Int64,
        rows: Int64,
        out: Int64,
        num_tokens: Int32,
    ):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = ptx.kept(Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint()))
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 32 * (self.warps + 1):
            self.init_barriers(shared)
        num_units, run = Int32(0), Int32(0)
        place_bytes = num_tokens * (self.top_k * self.inner * 2)
        if cutlass.const_expr(self.groups_itself):
            runs = hidden + (2 * place_bytes + block * 4)
            run = ptx.load_global(runs)
            most = self.max_tokens * self.top_k
            table = shared + Uint32(HEADER_BYTES)
            group_block(table, ids, weights, num_tokens * self.top_k, self.num_experts, most)
        else:
            cute.arch.griddepcontrol_wait()
            num_units = ptx.load_global(units)
        cute.arch.sync_threads()
        spare = hidden
        if cutlass.const_expr(self.groups_itself):
            num_units = count_units(table, most)
            if thread == 0:
                ptx.store_global(runs, Uint32(run + 1))
            spare = hidden + Int64((1 - (run & 1)) * place_bytes)
            hidden = hidden + Int64((run & 1) * place_bytes)

        first_row = self.first_row(block)
        num_rows = self.first_row(block + 1) - first_row
        begin = self.cut(block, num_units)
        tiles = self.cut(block + 1, num_units) - begin
        jobs = num_units if self.whole_jobs else num_units * num_rows
        if num_rows == 0:
            jobs = Int32(0)
        share = (begin, tiles, first_row, num_rows, jobs)
        if warp == self.warps + 1:
            self.copy(shared, (units, gate_up, down, share, ptx.evict_first_policy()))
        else:
            if warp == self.warps:
                self.serve(shared, units, hidden, begin, tiles)
            else:
                if cutlass.const_expr(self.groups_itself):
                    self.clear(spare, place_bytes)
                self.gate_up(shared, units, z, begin, tiles, warp)
            self.down(shared, units, hidden, rows, share, warp)
        if cutlass.const_expr(self.keeps_rows):
            cute.arch.sync_threads()
            self.combine(shared, ids, weights, out, first_row, num_rows, num_tokens)
        elif cutlass.const_expr(self.weighted):
            cute.arch.sync_threads()
            self.combine_stored(ids, weights, rows, out, first_row, num_rows, num_tokens)
        else:
            self.clear_dropped(ids, rows, first_row, num_rows, num_tokens)

    def kept_bytes(self, num_tokens: int) -> int:
        """What a program of so many tokens keeps: hidden values twice, runs of each block."""
        return 2 * num_tokens * self.top_k * self.inner * 2 + 4 * self.num_blocks

    @cute.jit
    def clear(self, spare: Int64, num_bytes: Int32):
        """The compute warps: marks a block's share of hidden values as not written."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first, step = thread * self.num_blocks + block, self.num_blocks * 32 * self.warps
        for piece in cutlass.range(first, num_bytes // 16, step, unroll=1):
            ptx.store_global_4(spare + Int64(piece) * 16, Uint32(ptx.NOT_WRITTEN))

    @cute.jit
    def init_barriers(self, shared: Uint32):
        """Ring slots full, empty and taken, then partial sums full and empty."""
        for slot in cutlass.range_constexpr(self.stages):
            ptx.barrier_init(self.full(shared, slot), 1)
            ptx.barrier_init_warps(self.empty(shared, slot), self.warps + 1)
            ptx.barrier_init_warps(self.taken(shared, slot), 1)
        for buffer in cutlass.range_constexpr(2):
            ptx.barrier_init_warps(self.summed(shared, buffer), self.warps)
            ptx.barrier_init_warps(self.drained(shared, buffer), 1)
        cute.arch.mbarrier_init_fence()

    def full(self, shared, slot):
        """Barrier: the slot's weights have landed."""
        return shared + Uint32(slot * 8)

    def empty(self, shared, slot):
        """Barrier: every warp but the copying one has read the slot's down weights."""
        return shared + Uint32((self.stages + slot) * 8)

    def taken(self, shared, slot):
        """Barrier: every compute warp has read the slot's gate/up tile."""
        return shared + Uint32((2 * self.stages + slot) * 8)

    def summed(self, shared, buffer):
        """Barrier: every compute warp has stored its partial sums."""
        return shared + Uint32((3 * self.stages + buffer) * 8)

    def drained(self, shared, buffer):
        """Barrier: the service warp has read the partial sums."""
        return shared + Uint32((3 * self.stages + 2 + buffer) * 8)

    def first_row(self, block):
        """First down tile of a block: the first blocks have one more than the others.

        They therefore have less of gate/up, and the units that the others are still busy with,
        being the last, are those that they need last.
        """
        each, more = divmod(self.down_tiles, self.num_blocks)
        return block * each + cutlass.min(block, more)

    @cute.jit
    def cut(self, block: Int32, num_units: Int32) -> Int32:
        """First gate/up tile of a block, in fixed point.

        The blocks below it hold their share of all bytes, less those of their down tiles.
        """
        both = self.gate_up_tiles * self.slot_bytes + self.down_tiles * self.down_bytes
        share = (both << _CUT_BITS) // (self.num_blocks * self.slot_bytes)
        row = (self.down_bytes << _CUT_BITS) // self.slot_bytes
        # Where down is most of the bytes, the blocks that have an extra row get no gate/up.
        per_unit = cutlass.max(block * share - self.first_row(block) * row, 0)
        tile = Int32((Int64(num_units) * Int64(per_unit)) >> _CUT_BITS)
        if block == self.num_blocks:
            tile = num_units * self.gate_up_tiles
        return tile

    def slot_jobs(self, num_rows):
        """Down jobs that share a ring slot."""
        return self.slot_tiles // cutlass.max(num_rows, 1) if self.whole_jobs else self.slot_tiles

    def job_rows(self, num_rows):
        """Row tiles of a down job."""
        return num_rows if self.whole_jobs else Int32(1)

    @cute.jit
    def place(self, job: Int32, num_rows: Int32):
        """Unit and first row, among the block's, of a down job."""
        unit, row = job, Int32(0)
        if cutlass.const_expr(not self.whole_jobs):
            unit, row = job // num_rows, job % num_rows
        return unit, row

    @cute.jit
    def expert_of(self, shared: Uint32, units: Int64, unit: Int32) -> Int32:
        """The expert of a unit."""
        expert = Int32(0)
        if cutlass.const_expr(self.groups_itself):
            expert = ptx.load_shared(shared + Uint32(HEADER_BYTES + unit * 4))
        else:
            expert = ptx.load_global(units + record_offset(unit))
        return expert

    @cute.jit
    def route_of(self, shared: Uint32, units: Int64, unit: Int32, column: Int32) -> Int32:
        """Route token * top_k + slot of a unit's column, or -1."""
        route = Int32(0)
        if cutlass.const_expr(self.groups_itself):
            place = HEADER_BYTES + ROUTES_OFFSET + (unit * UNIT + column) * 4
            route = ptx.load_shared(shared + Uint32(place))
        else:
            route = ptx.load_global(units + record_offset(unit) + 4 + column * 4)
        return route

    @cute.jit
    def serve(self, shared, units, hidden, begin, tiles):
        """The service warp: SiTU of every gate/up tile.

        That the sums of a tile are complete says that its slot has been read. It also says that the
        tile has landed, as a warp that takes down jobs must know: barriers tell only phases apart
        that are next to each other.
        """
        lane = cute.arch.lane_idx()
        column, pair = lane // 4, lane % 4
        route, unit_end = Int32(-1), Int32(0)
        for index in cutlass.range(tiles):
            if begin + index >= unit_end:
                unit = (begin + index) // self.gate_up_tiles
                unit_end = (unit + 1) * self.gate_up_tiles
                route = self.route_of(shared, units, unit, column)
            buffer = index & 1
            ptx.barrier_wait(self.summed(shared, buffer), Uint32(index >> 1) & Uint32(1))
            if ptx.arrives(lane):
                ptx.barrier_arrive(self.taken(shared, index % self.stages))
            pairs = self.add_partials(shared, buffer, column, pair)
            neuron = self.inner - (unit_end - begin - index) * NEURONS + pair * 2
            if route >= 0:
                ptx.store_relaxed(hidden + (Int64(route) * self.inner + neuron) * 2, pairs)

    @cute.jit
    def copy(self, shared, copies):
        """The copying warp: starts the copies of all stages, as slots and the window let it."""
        tiles = copies[3][1]
        for stage in cutlass.range(self.count_stages(copies[3]), unroll=1):
            if stage >= self.stages:
                before = stage - self.stages
                if before < tiles:
                    self.await_use(self.taken, shared, before % self.stages, before)
                else:
                    self.await_use(self.empty, shared, before % self.stages, before - tiles)
            if stage >= self.window:
                landed = stage - self.window
                self.await_use(self.full, shared, landed % self.stages, landed)
            if stage < tiles:
                self.copy_tile(shared, copies, stage)
            else:
                self.copy_jobs(shared, copies, stage)

    def await_use(self, barrier, shared, slot, stages):
        """Waits at a slot's barrier for a use that so many stages came before."""
        phase = Uint32(stages // self.stages) & Uint32(1)
        ptx.barrier_wait(barrier(shared, slot), phase)

    def count_stages(self, share):
        """How often the block fills a slot of the ring."""
        _, tiles, _, num_rows, jobs = share
        slot_jobs = self.slot_jobs(num_rows)
        return tiles + (jobs + slot_jobs - 1) // slot_jobs

    @cute.jit
    def copy_tile(self, shared, copies, stage):
        """Starts the copy of a stage that is a gate/up tile."""
        units, gate_up, _, share, policy = copies
        tile = share[0] + stage
        # What is known to be the same for all lanes needs no loop over them for a copy.
        expert = cute.arch.make_warp_uniform(
            self.expert_of(shared, units, tile // self.gate_up_tiles)
        )
        row = Int64(expert) * self.gate_up_tiles + tile % self.gate_up_tiles
        source = gate_up + row * self.slot_bytes
        full = self.full(shared, stage % self.stages)
        target = shared + Uint32(self.ring_offset + stage % self.stages * self.slot_bytes)
        if cute.arch.lane_idx() == 0:
            ptx.barrier_expect(full, Int32(self.slot_bytes))
            ptx.bulk_copy(target, source, Int32(self.slot_bytes), full, policy)

    @cute.jit
    def copy_jobs(self, shared, copies, stage):
        """Starts the copies of a stage of down jobs; a lane looks up the row tile of each."""
        units, _, down, share, policy = copies
        _, tiles, first_row, num_rows, jobs = share
        lane = cute.arch.lane_idx()
        full = self.full(shared, stage % self.stages)
        slot_jobs = self.slot_jobs(num_rows)
        job = (stage - tiles) * slot_jobs + lane
        count = cutlass.min(jobs - (job - lane), slot_jobs)
        num_bytes = self.job_rows(num_rows) * self.down_bytes
        tile = Int32(0)
        if lane < count:
            unit, row = self.place(job, num_rows)
            tile = self.expert_of(shared, units, unit) * self.down_tiles + first_row + row
        if lane == 0:
            ptx.barrier_expect(full, count * num_bytes)
        target = shared + Uint32(self.ring_offset + stage % self.stages * self.slot_bytes)
        for place in cutlass.range(count, unroll=1):
            place_tile = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(tile, place))
            source = down + Int64(place_tile) * self.down_bytes
            if lane == 0:
                ptx.bulk_copy(target, source, num_bytes, full, policy)
            target = target + Uint32(num_bytes)

    @cute.jit
    def add_partials(self, shared, buffer, column, pair) -> Uint32:
        """Two neurons of one column: sums over the warps, rounded, and SiTU, rounded."""
        piece = (column % 2 * 4 + pair) ^ (column // 2 * 2)
        source = shared + Uint32(self.partials_offset + column // 2 * 128 + piece * 16)
        source = source + Uint32(buffer * (self.warps * _PARTIAL_BYTES))
        sums = ptx.load_shared_floats_4(source)
        for other in cutlass.range_constexpr(1, self.warps):
            more = ptx.load_shared_floats_4(source + Uint32(other * _PARTIAL_BYTES))
            sums = [one + two for one, two in zip(sums, more, strict=True)]
        gates, ups = ptx.round_pair(sums[0], sums[2]), ptx.round_pair(sums[1], sums[3])
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        ptx.barrier_arrive_after(self.drained(shared, buffer), (gates, ups), ptx.arrives(lane))
        low = ptx.situ(ptx.low_float(gates), ptx.low_float(ups), self.beta, self.linear_beta)
        high = ptx.situ(ptx.high_float(gates), ptx.high_float(ups), self.beta, self.linear_beta)
        return ptx.round_pair(low, high)

    @cute.jit
    def advance(self, slot: Int32, phase: Uint32):
        """The next ring slot and its phase."""
        slot += 1
        if slot == self.stages:
            slot = Int32(0)
            phase = phase ^ Uint32(1)
        return slot, phase

    @cute.jit
    def gate_up(self, shared, units, z, begin, tiles, warp):
        """A compute warp's slice of L of every gate/up tile."""
        lane = cute.arch.lane_idx()
        slot, phase = Int32(0), Uint32(0)
        buffer, buffer_phase = Int32(0), Uint32(1)
        tokens = zeros(GROUP_CHUNKS * 8, Uint32)
        unit_end = Int32(0)
        group = shared + Uint32(self.ring_offset + warp * (GROUP_CHUNKS * CHUNK_BYTES))
        for tile in cutlass.range(begin, begin + tiles):
            if tile >= unit_end:
                unit = tile // self.gate_up_tiles
                unit_end = (unit + 1) * self.gate_up_tiles
                route = self.route_of(shared, units, unit, lane // 4)
                row = z + Int64(route // self.top_k) * (2 * self.latent) + warp * (2 * GROUP_SIZE)
                self.load_columns(tokens, row + (lane % 4) * 32, route >= 0)
            ptx.barrier_wait(self.full(shared, slot), phase)
            sums = zeros(8, Float32)  # two chains: even and odd instructions
            multiply_group(group + Uint32(slot * self.slot_bytes), tokens, 0, sums, GROUP_CHUNKS)
            slot, phase = self.advance(slot, phase)
            ptx.barrier_wait(self.drained(shared, buffer), buffer_phase)
            self.store_partial(shared, buffer * self.warps + warp, lane, sums)
            ptx.barrier_arrive_warp(self.summed(shared, buffer))
            buffer_phase = buffer_phase ^ Uint32(buffer)
            buffer = buffer ^ 1

    @cute.jit
    def down(self, shared, units, hidden, rows, share, warp):
        """A warp's share of the down jobs: every `takers`-th.

        The hidden values of the next job are on their way while the sums of this one are stored.
        """
        _, tiles, first_row, num_rows, jobs = share
        columns = zeros(self.batch_chunks * 8, Uint32)
        slot_jobs, job_rows = self.slot_jobs(num_rows), self.job_rows(num_rows)
        takers, job = self.warps + 1, warp
        slot, phase = tiles % self.stages, Uint32(tiles // self.stages) & Uint32(1)
        row, route, source = Int32(0), Int32(-1), hidden
        if job < jobs:
            unit, row = self.place(job, num_rows)
            route, source = self.find_hidden(shared, units, hidden, unit)
            self.load_hidden(columns, source, route)
        for first in cutlass.range(0, jobs, slot_jobs):
            last = cutlass.min(jobs, first + slot_jobs)
            ptx.barrier_wait(self.full(shared, slot), phase)
            for current in cutlass.range(job, last, takers):
                offset = slot * self.slot_bytes + (current - first) * (job_rows * self.down_bytes)
                weights = shared + Uint32(self.ring_offset + offset)
                job = current + takers
                next_row, next_route, next_source = Int32(0), Int32(-1), source
                if job < jobs:
                    unit, next_row = self.place(job, num_rows)
                    next_route, next_source = self.find_hidden(shared, units, hidden, unit)
                sums = zeros(8, Float32)
                more = zeros(8, Float32)
                for batch in cutlass.range(self.batches):
                    self.await_hidden(columns, source, route)
                    self.multiply_batch(weights, columns, sums)
                    if job_rows == 2:
                        self.multiply_batch(weights + Uint32(self.down_bytes), columns, more)
                    weights = weights + Uint32(self.batch_chunks * CHUNK_BYTES)
                    source = source + self.batch_chunks * 2 * CHUNK
                    following = route
                    if batch == self.batches - 1:
                        source, following = next_source, next_route
                    self.load_hidden(columns, source, following)
                self.store_sums(shared, rows, sums, route, row, first_row)
                if job_rows == 2:
                    self.store_sums(shared, rows, more, route, row + 1, first_row)
                row, route = next_row, next_route
            ptx.barrier_arrive_warp(self.empty(shared, slot))
            slot, phase = self.advance(slot, phase)

    @cute.jit
    def load_columns(self, words: cute.Tensor, address: Int64, present):
        """A lane's 16 elements of each chunk of its column.

        Without a route the column keeps what it held; its sums are dropped.
        """
        if present:
            for chunk in cutlass.range_constexpr(GROUP_CHUNKS):
                for half in cutlass.range_constexpr(2):
                    loaded = ptx.load_global_4(address + chunk * (2 * CHUNK) + half * 16)
                    for word in cutlass.range_constexpr(4):
                        words[chunk * 8 + half * 4 + word] = loaded[word]

    @cute.jit
    def store_partial(self, shared: Uint32, index: Int32, lane: Int32, sums: cute.Tensor):
        """A warp's 16 x 8 sums, column by column, each gate row beside its up row.

        Of the 8 pieces of 16 bytes of two columns, piece p stands at p ^ 2 c, c being the pair of
        columns, so that neither these stores nor the loads of the sums meet a bank twice.
        """
        pair, row = lane % 4, lane // 4
        place = shared + Uint32(self.partials_offset + index * _PARTIAL_BYTES)
        place = place + Uint32(pair * 128 + ((row // 2) ^ (2 * pair)) * 16 + row % 2 * 8)
        for side in cutlass.range_constexpr(2):
            gate, up = sums[side] + sums[side + 4], sums[side + 2] + sums[side + 6]
            ptx.store_shared_floats(place ^ Uint32(64 * side), gate, up)

    @cute.jit
    def find_hidden(self, shared, units, hidden, unit):
        """This lane's route of a unit, and where its hidden values begin."""
        lane = cute.arch.lane_idx()
        route = self.route_of(shared, units, unit, lane // 4)
        return route, hidden + Int64(route) * (2 * self.inner) + (lane % 4) * 32

    @cute.jit
    def load_hidden(self, columns: cute.Tensor, source: Int64, route: Int32):
        """Starts the loads of a lane's hidden values of its column, if it has a route."""
        if route >= 0:
            for chunk in cutlass.range_constexpr(self.batch_chunks):
                for half in cutlass.range_constexpr(2):
                    loaded = ptx.load_relaxed_4(source + chunk * (2 * CHUNK) + half * 16)
                    for word in cutlass.range_constexpr(4):
                        columns[chunk * 8 + half * 4 + word] = loaded[word]

    @cute.jit
    def await_hidden(self, columns: cute.Tensor, source: Int64, route: Int32):
        """Loads again until every word has been written."""
        missing = self.some_missing(columns)
        while missing:
            self.load_hidden(columns, source, route)
            missing = self.some_missing(columns)

    @cute.jit
    def some_missing(self, columns: cute.Tensor):
        """Whether a lane of the warp holds a word that was not written yet."""
        newest = Uint32(0)
        for chunk in cutlass.range_constexpr(self.batch_chunks):
            for word in cutlass.range_constexpr(8):
                newest = cutlass.max(newest, columns[chunk * 8 + word])
        return cute.arch.vote_any_sync(newest == Uint32(ptx.NOT_WRITTEN))

    @cute.jit
    def multiply_batch(self, weights: Uint32, columns: cute.Tensor, sums: cute.Tensor):
        """sums += a batch of chunks of a down tile times the hidden values."""
        first = 0
        for size in chunk_groups(self.batch_chunks):
            multiply_group(weights + Uint32(first * CHUNK_BYTES), columns, first * 8, sums, size)
            first += size

    @cute.jit
    def store_sums(self, shared, rows, sums, route, row, first_row):
        """Rounds a down tile and stores it where its consumer reads it.

        A lane holds rows 2g and 2g + 1 of the tile for two columns; lane 4c knows column c's route.
        """
        lane = cute.arch.lane_idx()
        for side in cutlass.range_constexpr(2):
            pair = ptx.round_pair(sums[side] + sums[side + 4], sums[side + 2] + sums[side + 6])
            target = cute.arch.shuffle_sync(route, lane % 4 * 8 + side * 4)
            if target >= 0:
                self.store_row(shared, rows, target, row, first_row, lane // 4 * 4, pair)

    @cute.jit
    def store_row(self, shared, rows, route, row, first_row, offset, pair):
        """Two elements of a route's row: kept for the weighted sum, or written out."""
        if cutlass.const_expr(self.keeps_rows):
            place = (route * self.block_down_tiles + row) * (2 * ROW_TILE) + offset
            ptx.store_shared(shared + Uint32(self.rows_offset + place), pair)
        else:
            place = (first_row + row) * (2 * ROW_TILE) + offset
            ptx.store_global(rows + Int64(route) * (2 * self.latent) + place, pair)

    @cute.jit
    def combine(self, shared, ids, weights, out, first_row, num_rows, num_tokens):
        """out[t, rows of this block] = sum of weights[t, s] * row[t, s] over slots in order."""
        thread, _, _ = cute.arch.thread_idx()
        words = num_rows * (ROW_TILE // 2)
        for index in cutlass.range(thread, num_tokens * words, self.threads):
            token, word = index // words, index % words
            low, high = Float32(0.0), Float32(0.0)
            for slot in cutlass.range_constexpr(self.top_k):
                route = token * self.top_k + slot
                expert, weight = self.chosen(shared, ids, weights, route)
                place = route * (self.block_down_tiles * 2 * ROW_TILE) + word * 4
                pair = Uint32(ptx.load_shared(shared + Uint32(self.rows_offset + place)))
                if Uint32(expert) < Uint32(self.num_experts):
                    low = ptx.fused(weight, ptx.low_float(pair), low)
                    high = ptx.fused(weight, ptx.high_float(pair), high)
            place = (Int64(token) * self.latent + first_row * ROW_TILE) * 2 + word * 4
            ptx.store_global(out + place, ptx.round_pair(low, high))

    @cute.jit
    def combine_stored(self, ids, weights, rows, out, first_row, num_rows, num_tokens):
        """`combine` with the rows that this block has stored in global memory, 8 columns a lane."""
        thread, _, _ = cute.arch.thread_idx()
        pieces = num_rows * (ROW_TILE // 8)
        for index in cutlass.range(thread, num_tokens * pieces, self.threads):
            token, piece = index // pieces, index % pieces
            place = Int64(first_row * ROW_TILE + piece * 8) * 2
            first = Int64(token) * self.top_k
            sums = zeros(8, Float32)
            loaded = [
                ptx.load_relaxed_4(rows + (first + slot) * (2 * self.latent) + place)
                for slot in range(self.top_k)
            ]
            for slot in cutlass.range_constexpr(self.top_k):
                expert = ptx.load_global(ids + (first + slot) * 4)
                weight = ptx.load_global_float(weights + (first + slot) * 4)
                if Uint32(expert) < Uint32(self.num_experts):
                    for word in cutlass.range_constexpr(4):
                        low, high = (
                            read(loaded[slot][word]) for read in (ptx.low_float, ptx.high_float)
                        )
                        sums[2 * word] = ptx.fused(weight, low, sums[2 * word])
                        sums[2 * word + 1] = ptx.fused(weight, high, sums[2 * word + 1])
            pairs = [ptx.round_pair(sums[2 * word], sums[2 * word + 1]) for word in range(4)]
            ptx.store_global_words(out + Int64(token) * (2 * self.latent) + place, pairs)

    @cute.jit
    def chosen(self, shared: Uint32, ids: Int64, weights: Int64, route: Int32):
        """Expert and weight of a route."""
        expert, weight = Int32(0), Float32(0.0)
        if cutlass.const_expr(self.groups_itself):
            kept = shared + Uint32(HEADER_BYTES + GAINS_OFFSET + route * 8)
            expert = ptx.load_shared(kept)
            weight = ptx.load_shared_float(kept + Uint32(4))
        else:
            expert = ptx.load_global(ids + Int64(route) * 4)
            weight = ptx.load_global_float(weights + Int64(route) * 4)
        return expert, weight

    @cute.jit
    def clear_dropped(self, ids, rows, first_row, num_rows, num_tokens):
        """Zeros in this block's part of the rows of dropped routes."""
        thread, _, _ = cute.arch.thread_idx()
        for route in cutlass.range(thread, num_tokens * self.top_k, self.threads):
            if Uint32(ptx.load_global(ids + Int64(route) * 4)) >= Uint32(self.num_experts):
                target = rows + (Int64(route) * self.latent + first_row * ROW_TILE) * 2
                for piece in cutlass.range(num_rows * 2):
                    ptx.store_global_4(target + piece * 16, Uint32(0))


REPRESENTATIVES = {
    f"decode, up to {max_tokens} tokens, TP={3072 // inner}": DecodeKernel(
        num_experts=896,
        latent=3584,
        inner=inner,
        top_k=16,
        max_tokens=max_tokens,
        num_blocks=132,
        stages=5,
        window=2,
        beta=4.0,
        linear_beta=25.0,
        weighted=True,
        keeps_rows=max_tokens <= 64,
    )
    for max_tokens, inner in ((2, 384), (8, 384), (8, 192), (64, 384), (256, 384))
}
