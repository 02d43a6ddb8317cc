"""Routed experts of a single token: gate/up, SiTU, down and weighted sum in one launch.

With one token a multiprocessor reads some 270 KB in all, so what counts is that the reading starts
at once and never pauses, and that little is left to do when the last byte lands. One block runs on
each multiprocessor: warps for gate/up, a service warp, a warp that starts all copies, and a warp
for down of each slot.

Barriers are made first, few by any warp, for making one takes some 25 cycles. Then each warp loads
the ids, the token and the like: behind the stream of weights a load comes when the bytes that are
on their way have come, microseconds later.

Copies. The slots whose id is an expert are the units, and every warp finds them itself. Block b
takes gate/up row tiles b, b + grid, and so on (8 gate and the matching 8 up rows over all of L), so
that units are complete one after another, and a few down row tiles of every unit. One warp starts
all copies in the order in which their bytes are needed: tile t + `AHEAD` once tile t has landed and
its place in the ring is free, and then down's rows of each unit whose last tiles were read `LAG`
rounds before. Rows that are started sooner take the memory's rate from gate/up, for which all of
down waits in the end; at the last tile, all that are left are started.

Gate/up. Warp w owns k = 256 w .. 256 w + 255: that slice of every tile, and of the token in shared
memory. The warps' partial sums meet in shared memory, where the service warp adds them in warp
order, applies SiTU and stores the hidden values.

Down. A block has all slots for its rows and adds them itself. Down warp w takes slot w: it waits
for the rows' weights and for the slot's hidden values, multiplies, and leaves rounded rows in
shared memory; at the end the block adds the rows in slot order, or writes them out. So down of
early slots runs beside gate/up of late ones, and little is left for the end.

Hidden values live in memory that the call keeps between its runs, twice. A word that is not there
yet is 0xFFFFFFFF, which no rounded pair of bf16 can be, and down loads until none is left. Every
block counts the runs in a word of its own. Run e uses half e % 2, of which every word is marked,
and marks the other half again: the run before is over, so nobody reads it any more.

Sums of a slot are formed in the order in which the decode kernel forms them.

Why it cannot hang. The copying warp waits for tiles that it started before, and for the gate/up
warps to have read the tile whose place in the ring it fills; these wait for copies in the order in
which it starts them. Partial sums have two buffers: a gate/up warp waits for the service warp to
empty one, the service warp for all gate/up warps to fill it, and all take the same sequence of
tiles. So gate/up and the copies of a block wait for nothing outside the block, nor for its down
warps. These wait for a copy, and for gate/up of all blocks, which are all resident: one a
multiprocessor, no more blocks than multiprocessors.
A wait for a phase by its parity must not come two phases late. A place of the ring is filled again
only when every gate/up warp has read it, so after each has waited for what it held, and after the
copying warp has waited for that too; it is read again only after the copying warp has filled it.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_chunks import multiply_groups, zeros
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

MAX_SLOTS = 32
"""Most slots of the token: a lane each."""

AHEAD = 2
"""Gate/up tiles of a block that are on their way."""
LAG = 2
"""Rounds of tiles between a unit's last one and the start of its down weights."""
SLICES = 2
"""Warps' slices of a gate/up tile that one copy brings."""

_GROUP_BYTES = GROUP_CHUNKS * CHUNK_BYTES
_SUMS_BYTES = ROW_TILE * 4
"""A warp's sums of a row tile."""
_PIECE = 8
"""Hidden values of a load."""


def _aligned(num_bytes):
    return -(-num_bytes // 128) * 128


@dataclass(frozen=True)
class SingleTokenKernel(Kernel):
    """sum over slots of weights[s] * expert(z, ids[s]), or the unweighted rows.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        top_k: slots, at most `MAX_SLOTS`.
        latent: L, a multiple of 256.
        inner: I of this rank, a multiple of 64.
        num_blocks: grid; at most the device's multiprocessors.
        stages: gate/up tiles that the ring holds, more than `AHEAD`.
        beta: soft cap of the gate.
        linear_beta: soft cap of the linear branch, or None.
        weighted: write the weighted sum [L] rather than rows [top_k, L].
    """

    num_experts: int
    top_k: int
    latent: int
    inner: int
    num_blocks: int
    stages: int
    beta: float
    linear_beta: float | None
    weighted: bool

    parameters = (
        ("z", "address"),
        ("ids", "address"),
        ("weights", "address"),
        ("gate_up", "address"),
        ("down", "address"),
        ("hidden", "address"),
        ("runs", "address"),
        ("out", "address"),
    )
    min_blocks = 1

    @property
    def hidden_bytes(self) -> int:
        """Hidden values of all slots."""
        return self.top_k * self.inner * 2

    @property
    def warps(self) -> int:
        """Gate/up warps."""
        return self.latent // GROUP_SIZE

    @property
    def threads(self) -> int:
        """Gate/up warps, service warp, copying warp, down warps."""
        return 32 * (self.warps + 2 + self.top_k)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return self.num_blocks, 1, 1

    @property
    def num_tiles(self) -> int:
        """Gate/up row tiles of an expert."""
        return self.inner // NEURONS

    @property
    def tile_bytes(self) -> int:
        """A gate/up row tile."""
        return self.warps * _GROUP_BYTES

    @property
    def pieces(self) -> int:
        """Copies of a gate/up row tile."""
        return -(-self.warps // SLICES)

    @property
    def down_tiles(self) -> int:
        """Down row tiles of an expert."""
        return self.latent // ROW_TILE

    @property
    def block_tiles(self) -> int:
        """Most down row tiles of a block."""
        return -(-self.down_tiles // self.num_blocks)

    @property
    def down_bytes(self) -> int:
        """A down row tile."""
        return self.inner // CHUNK * CHUNK_BYTES

    @property
    def row_bytes(self) -> int:
        """The block's part of a row."""
        return self.block_tiles * 2 * ROW_TILE

    @property
    def job_bytes(self) -> int:
        """The block's down weights of a slot."""
        return self.block_tiles * self.down_bytes

    @property
    def gains_offset(self) -> int:
        """Shared memory of the slots' weights, after the barriers."""
        return _aligned(8 * (self.stages * (self.pieces + 1) + 4 + self.top_k))

    @property
    def rows_offset(self) -> int:
        """Shared memory of the rows."""
        return _aligned(self.gains_offset + 4 * MAX_SLOTS + 4)

    @property
    def partials_offset(self) -> int:
        """Shared memory of the partial sums, two sets."""
        return _aligned(self.rows_offset + self.top_k * self.row_bytes)

    @property
    def token_offset(self) -> int:
        """Shared memory of the token, slice by slice."""
        return _aligned(self.partials_offset + 2 * self.warps * _SUMS_BYTES)

    @property
    def hidden_offset(self) -> int:
        """Shared memory of each slot's hidden values."""
        return _aligned(self.token_offset + 2 * self.latent)

    @property
    def down_offset(self) -> int:
        """Shared memory of each slot's down weights."""
        return _aligned(self.hidden_offset + self.top_k * 2 * self.inner)

    @property
    def ring_offset(self) -> int:
        """Shared memory of the ring of gate/up tiles."""
        return _aligned(self.down_offset + self.top_k * self.job_bytes)

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.ring_offset + self.stages * self.tile_bytes

    @cute.kernel
    def device(
        self,
        z: Int64,
        ids: Int64,
        weights: Int64,
        gate_up: Int64,
        down: Int64,
        hidden: Int64,
        runs: Int64,
        out: Int64,
    ):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = cute.arch.lane_idx()
        shared = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        self.init_barriers(shared, warp - self.warps)
        place = Int64(cutlass.min(lane, self.top_k - 1)) * 4
        loaded = ptx.load_global(ids + place)
        gain = ptx.load_global(weights + place)
        run = ptx.load_global(runs + Int64(block) * 4)
        words = self.load_token(z, warp)
        experts, slots, taken = self.find_units(loaded)
        count = Int32(cute.arch.popc(taken))
        # Every num_blocks-th tile: units are complete one after another, not all at the end.
        tiles = (count * self.num_tiles - block + self.num_blocks - 1) // self.num_blocks
        work = (experts, slots, count, tiles)
        if warp == self.warps + 1:
            for tile in cutlass.range_constexpr(AHEAD):
                if tile < tiles:
                    self.copy_tile(shared, gate_up, work, Int32(tile))
        elif warp == self.warps:
            self.keep_gains(shared, gain, taken)
        elif warp < self.warps:
            ptx.store_shared_4(self.token(shared, warp) + Uint32(lane * 16), words)
        cute.arch.sync_threads()

        half = hidden + Int64((run & 1) * self.hidden_bytes)
        if warp < self.warps:
            self.compute(shared, tiles, warp)
        elif warp == self.warps:
            self.serve(shared, half, work)
        elif warp == self.warps + 1:
            self.mark(hidden + Int64((run & 1 ^ 1) * self.hidden_bytes))
            self.start_copies(shared, gate_up, down, work)
        else:
            self.take_slot(shared, half, taken, warp - (self.warps + 2))
        cute.arch.sync_threads()
        if cutlass.const_expr(self.weighted):
            self.combine(shared, out)
        else:
            self.write_rows(shared, out)
        if thread == 0:
            ptx.store_global(runs + Int64(block) * 4, Uint32(run + 1))

    @cute.jit
    def init_barriers(self, shared: Uint32, warp: Int32):
        """The barriers, each by one lane of the warp that makes it; gate/up warps make none."""
        if cute.arch.lane_idx() == 0:
            if warp == 0:
                for buffer in cutlass.range_constexpr(2):
                    ptx.barrier_init_warps(self.summed(shared, buffer), self.warps)
                    ptx.barrier_init_warps(self.drained(shared, buffer), 1)
            elif warp == 1:
                for piece in cutlass.range_constexpr(self.stages * self.pieces):
                    ptx.barrier_init(self.full(shared, 0, piece), 1)
                for stage in cutlass.range_constexpr(self.stages):
                    ptx.barrier_init_warps(self.read(shared, stage), self.warps)
            elif warp >= 2:
                ptx.barrier_init(self.down_full(shared, warp - 2), 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def find_units(self, loaded: Int32):
        """Expert and slot of this lane's unit, and which slots have an expert, a bit each."""
        lane = cute.arch.lane_idx()
        known = (lane < self.top_k) & (Uint32(loaded) < Uint32(self.num_experts))
        taken = Uint32(cute.arch.vote_ballot_sync(known))
        slot = lane
        # Unless the first slots are the units, each lane looks for its own.
        if (taken & (taken + Uint32(1))) != Uint32(0):
            left = lane
            slot = Int32(0)
            for step in cutlass.range_constexpr(5):
                half = 16 >> step
                below = Int32(cute.arch.popc((taken >> Uint32(slot)) & Uint32((1 << half) - 1)))
                if left >= below:
                    left -= below
                    slot += half
        return cute.arch.shuffle_sync(loaded, slot), slot, taken

    def full(self, shared, stage, piece):
        """Barrier: the copy of a piece of a tile has landed."""
        return shared + Uint32((stage * self.pieces + piece) * 8)

    def read(self, shared, stage):
        """Barrier: every gate/up warp has read the tile."""
        return shared + Uint32((self.stages * self.pieces + stage) * 8)

    def summed(self, shared, buffer):
        """Barrier: every gate/up warp has stored its partial sums."""
        return shared + Uint32((self.stages * (self.pieces + 1) + buffer) * 8)

    def drained(self, shared, buffer):
        """Barrier: the service warp has read the partial sums."""
        return shared + Uint32((self.stages * (self.pieces + 1) + 2 + buffer) * 8)

    def down_full(self, shared, slot):
        """Barrier: the down weights of the slot have landed."""
        return shared + Uint32((self.stages * (self.pieces + 1) + 4 + slot) * 8)

    def down_at(self, shared, slot):
        """A slot's down weights."""
        return shared + Uint32(self.down_offset + slot * self.job_bytes)

    def tile_at(self, shared, stage, warp):
        """A warp's slice of a tile in the ring."""
        return shared + Uint32(self.ring_offset + stage * self.tile_bytes + warp * _GROUP_BYTES)

    def token(self, shared, warp):
        """A warp's slice of the token."""
        return shared + Uint32(self.token_offset + warp * (2 * GROUP_SIZE))

    def partial(self, shared, buffer, warp):
        """A warp's 16 sums."""
        return shared + Uint32(self.partials_offset + (buffer * self.warps + warp) * _SUMS_BYTES)

    def hidden_at(self, shared, slot):
        """A slot's hidden values."""
        return shared + Uint32(self.hidden_offset + slot * (2 * self.inner))

    def row(self, shared, slot):
        """The block's part of a slot's row."""
        return shared + Uint32(self.rows_offset + slot * self.row_bytes)

    @cute.jit
    def load_token(self, z: Int64, warp: Int32):
        """A lane's part of the warp's slice of the token.

        Loaded before the first copies start: behind them, it would come when they have.
        """
        piece = cutlass.min(warp * 32 + cute.arch.lane_idx(), self.latent // _PIECE - 1)
        return ptx.load_global_4(z + Int64(piece) * 16)

    @cute.jit
    def keep_gains(self, shared: Uint32, gain: Int32, taken: Uint32):
        """One warp: the slots' weights, and which slots have an expert."""
        lane = cute.arch.lane_idx()
        gains = shared + Uint32(self.gains_offset)
        if lane < self.top_k:
            ptx.store_shared(gains + Uint32(lane * 4), gain)
        if lane == 0:
            ptx.store_shared(gains + Uint32(4 * MAX_SLOTS), taken)

    @cute.jit
    def taken(self, shared: Uint32) -> Uint32:
        """Which slots have an expert, a bit each."""
        return Uint32(ptx.load_shared(shared + Uint32(self.gains_offset + 4 * MAX_SLOTS)))

    @cute.jit
    def copy_tile(self, shared: Uint32, gate_up: Int64, work, index: Int32):
        """Starts the copies of the block's gate/up tile `index`."""
        experts, _, _, _ = work
        block, _, _ = cute.arch.block_idx()
        tile = block + index * self.num_blocks
        expert = cute.arch.make_warp_uniform(
            cute.arch.shuffle_sync(experts, tile // self.num_tiles)
        )
        if cute.arch.lane_idx() == 0:
            stage = index % self.stages
            row = Int64(expert) * self.num_tiles + tile % self.num_tiles
            policy = ptx.evict_first_policy()
            for piece in cutlass.range_constexpr(self.pieces):
                first = piece * SLICES
                num_bytes = Int32((min(first + SLICES, self.warps) - first) * _GROUP_BYTES)
                full, target = self.full(shared, stage, piece), self.tile_at(shared, stage, first)
                source = gate_up + row * self.tile_bytes + first * _GROUP_BYTES
                ptx.barrier_expect(full, num_bytes)
                ptx.bulk_copy(target, source, num_bytes, full, policy)

    @cute.jit
    def copy_rows(self, shared: Uint32, down: Int64, work, unit: Int32):
        """Starts the copy of the block's down rows of a unit."""
        experts, slots, _, _ = work
        expert = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(experts, unit))
        slot = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(slots, unit))
        first, rows = self.down_share()
        if (cute.arch.lane_idx() == 0) & (rows > 0):
            full, num_bytes = self.down_full(shared, slot), rows * self.down_bytes
            source = down + (Int64(expert) * self.down_tiles + first) * self.down_bytes
            policy = ptx.evict_first_policy()
            ptx.barrier_expect(full, num_bytes)
            ptx.bulk_copy(self.down_at(shared, slot), source, num_bytes, full, policy)

    @cute.jit
    def start_copies(self, shared: Uint32, gate_up: Int64, down: Int64, work):
        """The copying warp: what comes after the first tiles, in order."""
        _, _, count, tiles = work
        unit = Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            stage, phase = tile % self.stages, Uint32(tile // self.stages) & Uint32(1)
            for piece in cutlass.range_constexpr(self.pieces):
                ptx.barrier_wait(self.full(shared, stage, piece), phase)
            index = tile + AHEAD
            if index < tiles:
                if index >= self.stages:
                    last = index // self.stages - 1
                    read = self.read(shared, index % self.stages)
                    ptx.barrier_wait(read, Uint32(last) & Uint32(1))
                self.copy_tile(shared, gate_up, work, index)
            rounds = cutlass.max(tile + 1 - LAG, 0)
            due = cutlass.min(rounds * self.num_blocks // self.num_tiles, count)
            for one in cutlass.range(unit, due, unroll=1):
                self.copy_rows(shared, down, work, one)
            unit = due
        for one in cutlass.range(unit, count, unroll=1):
            self.copy_rows(shared, down, work, one)

    @cute.jit
    def mark(self, other: Int64):
        """One warp: marks the block's share of the half that the next run uses."""
        block, _, _ = cute.arch.block_idx()
        for piece in cutlass.range(
            block * 32 + cute.arch.lane_idx(), self.hidden_bytes // 16, self.num_blocks * 32
        ):
            ptx.store_global_4(other + Int64(piece) * 16, Uint32(ptx.NOT_WRITTEN))

    @cute.jit
    def compute(self, shared: Uint32, tiles: Int32, warp: Int32):
        """A gate/up warp's slice of L of every tile of the block."""
        lane = cute.arch.lane_idx()
        column = self.token(shared, warp) + Uint32(lane % 4 * 32)
        for index in cutlass.range(tiles):
            stage, phase = index % self.stages, Uint32(index // self.stages) & Uint32(1)
            # By bits: as divisions, they would become loop variables, and registers.
            buffer, emptied = index & 1, (Uint32(index >> 1) & Uint32(1)) ^ Uint32(1)
            ptx.barrier_wait(self.full(shared, stage, warp // SLICES), phase)
            sums = zeros(8, Float32)
            multiply_groups([self.tile_at(shared, stage, warp)], column, [sums], GROUP_CHUNKS)
            ptx.barrier_wait(self.drained(shared, buffer), emptied)
            if lane % 4 == 0:
                place = self.partial(shared, buffer, warp) + Uint32(lane)
                ptx.store_shared_float(place, sums[0] + sums[4])
                ptx.store_shared_float(place + Uint32(32), sums[2] + sums[6])
            ptx.barrier_arrive_warp(self.summed(shared, buffer))
            if ptx.arrives(lane):
                ptx.barrier_arrive(self.read(shared, stage))

    @cute.jit
    def serve(self, shared: Uint32, half: Int64, work):
        """The service warp: SiTU of every tile, a neuron in each of eight lanes."""
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        _, slots, _, tiles = work
        neuron = lane % NEURONS
        stores = (lane < NEURONS) & (neuron % 2 == 0)
        for index in cutlass.range(tiles):
            buffer, phase = index & 1, Uint32(index >> 1) & Uint32(1)
            tile = block + index * self.num_blocks
            slot = cute.arch.shuffle_sync(slots, tile // self.num_tiles)
            ptx.barrier_wait(self.summed(shared, buffer), phase)
            pair = self.add_partials(shared, buffer, neuron)
            place = slot * self.inner + (tile % self.num_tiles * NEURONS + neuron)
            if stores:
                ptx.store_relaxed(half + Int64(place) * 2, pair)

    @cute.jit
    def add_partials(self, shared: Uint32, buffer: Int32, neuron: Int32) -> Uint32:
        """A neuron and its right neighbour: sums over the warps, rounded, and SiTU, rounded."""
        gate, up = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            place = self.partial(shared, buffer, warp) + Uint32(neuron * 4)
            if cutlass.const_expr(warp == 0):
                gate, up = ptx.load_shared_float(place), ptx.load_shared_float(place + Uint32(32))
            else:
                gate += ptx.load_shared_float(place)
                up += ptx.load_shared_float(place + Uint32(32))
        pair = ptx.round_pair(gate, up)
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        ptx.barrier_arrive_after(self.drained(shared, buffer), (pair, pair), ptx.arrives(lane))
        gate, up = ptx.low_float(pair), ptx.high_float(pair)
        value = ptx.situ(gate, up, self.beta, self.linear_beta)
        return ptx.round_pair(value, cute.arch.shuffle_sync_bfly(value, 1))

    def down_share(self):
        """First down row tile of this block, and how many it has."""
        block, _, _ = cute.arch.block_idx()
        each, more = divmod(self.down_tiles, self.num_blocks)
        first = block * each + cutlass.min(block, more)
        return first, each + Int32(block < more)

    @cute.jit
    def take_slot(self, shared: Uint32, half: Int64, taken: Uint32, slot: Int32):
        """A down warp: its slot's rows, for the block's row tiles."""
        _, rows = self.down_share()
        if ((taken >> Uint32(slot)) & Uint32(1) != Uint32(0)) & (rows > 0):
            ptx.barrier_wait(self.down_full(shared, slot), Uint32(0))
            self.take_hidden(shared, half, slot)
            self.multiply(shared, slot, rows)

    @cute.jit
    def take_hidden(self, shared: Uint32, half: Int64, slot: Int32):
        """Brings a slot's hidden values into shared memory, once all are there."""
        lane = cute.arch.lane_idx()
        source = half + Int64(slot) * (2 * self.inner)
        target = self.hidden_at(shared, slot)
        missing = cute.arch.vote_any_sync(lane >= 0)
        while missing:
            newest = Uint32(0)
            for piece in cutlass.range(lane, self.inner // _PIECE, 32, unroll=2):
                words = ptx.load_relaxed_4(source + piece * 16)
                ptx.store_shared_4(target + Uint32(piece * 16), words)
                for word in words:
                    newest = cutlass.max(newest, word)
            missing = cute.arch.vote_any_sync(newest == Uint32(ptx.NOT_WRITTEN))
        cute.arch.sync_warp()

    @cute.jit
    def multiply(self, shared: Uint32, slot: Int32, tiles: Int32):
        """The block's row tiles of a slot; rounded, they stay in shared memory.

        A lane holds rows 2g and 2g + 1 of a tile; all columns are the token.
        """
        lane = cute.arch.lane_idx()
        column = self.hidden_at(shared, slot) + Uint32(lane % 4 * 32)
        weights = self.down_at(shared, slot)
        # Two tiles at a time; where there is one more, it takes both places.
        for tile in cutlass.range(0, tiles, 2, unroll=1):
            pair = (tile, cutlass.min(tile + 1, tiles - 1))
            sums = [zeros(8, Float32) for _ in pair]
            first = 0
            for size in chunk_groups(self.inner // CHUNK):
                offsets = [one * self.down_bytes + first * CHUNK_BYTES for one in pair]
                groups = [weights + Uint32(offset) for offset in offsets]
                multiply_groups(groups, column + Uint32(first * 2 * CHUNK), sums, size)
                first += size
            if lane % 4 == 0:
                for one, of in zip(pair, sums, strict=True):
                    low, high = of[0] + of[4], of[2] + of[6]
                    target = self.row(shared, slot) + Uint32(lane + one * (2 * ROW_TILE))
                    ptx.store_shared(target, ptx.round_pair(low, high))

    @cute.jit
    def combine(self, shared: Uint32, out: Int64):
        """out[the block's rows] = sum of weights[s] * row[s] over slots in order."""
        thread, _, _ = cute.arch.thread_idx()
        first, tiles = self.down_share()
        taken = self.taken(shared)
        for word in cutlass.range(thread, tiles * (ROW_TILE // 2), self.threads):
            low, high = Float32(0.0), Float32(0.0)
            for slot in cutlass.range_constexpr(self.top_k):
                gain = ptx.load_shared_float(shared + Uint32(self.gains_offset + slot * 4))
                pair = Uint32(ptx.load_shared(self.row(shared, slot) + Uint32(word * 4)))
                if (taken & Uint32(1 << slot)) != Uint32(0):
                    low = ptx.fused(gain, ptx.low_float(pair), low)
                    high = ptx.fused(gain, ptx.high_float(pair), high)
            ptx.store_global(out + first * (2 * ROW_TILE) + word * 4, ptx.round_pair(low, high))

    @cute.jit
    def write_rows(self, shared: Uint32, out: Int64):
        """The block's part of every slot's row, zeros where the id was dropped."""
        thread, _, _ = cute.arch.thread_idx()
        first, tiles = self.down_share()
        taken = self.taken(shared)
        words = tiles * (ROW_TILE // 2)
        for index in cutlass.range(thread, self.top_k * words, self.threads):
            slot, word = index // words, index % words
            pair = Uint32(0)
            if (taken >> Uint32(slot)) & Uint32(1) != Uint32(0):
                pair = Uint32(ptx.load_shared(self.row(shared, slot) + Uint32(word * 4)))
            place = Int64(slot) * (2 * self.latent) + first * (2 * ROW_TILE) + word * 4
            ptx.store_global(out + place, pair)


_K3 = {"num_experts": 896, "top_k": 16, "latent": 3584}

REPRESENTATIVES = {
    f"single token, TP={3072 // inner}": SingleTokenKernel(
        **_K3,
        inner=inner,
        num_blocks=132,
        stages=3,
        beta=4.0,
        linear_beta=25.0,
        weighted=True,
    )
    for inner in (384, 192)
}
