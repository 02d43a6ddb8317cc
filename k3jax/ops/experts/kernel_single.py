"""Routed experts of a single token: gate/up, SiTU, down and weighted sum in one launch.

With one token a multiprocessor reads some 270 KB in all, so what counts is that the reading starts
at once and never pauses, and that little is left to do when the last byte lands. One block runs on
each multiprocessor: warps for gate/up, two service warps, and warps for down, one for each slot.

The first thing that a warp does is to load the ids, the token and the like: behind the stream of
weights a load comes when the bytes that are on their way have come, microseconds later.

Gate/up. The slots whose id is an expert are its units, and every warp finds them itself. Block b
takes row tiles b, b + grid, and so on (8 gate and the matching 8 up rows over all of L), so that
units are complete one after another. Warp w owns k = 256 w .. 256 w + 255: a ring of slots of its
own for that slice of the tiles, which it fills and reads alone, and that slice of the token in
shared memory. The warps' partial sums meet in shared memory, where the service warps, taking turns,
add them in warp order, apply SiTU and store the hidden values.

Down. A block holds a few row tiles of every slot's expert, so that it has all slots for its rows
and adds them itself. Down warp w takes slot w. Of the block's gate/up tiles, some are the round in
which the slot's last ones are read; when the next tile has landed, the warp starts the copy of its
rows, so that the bytes come in the order in which they are needed. It waits for them and for the
slot's hidden values, multiplies, and leaves rounded rows in shared memory; at the end the block
adds the rows in slot order, or writes them out. So down of early slots runs beside gate/up of late
ones, and little is left for the end.

Hidden values live in memory that the call keeps between its runs, twice. A word that is not there
yet is 0xFFFFFFFF, which no rounded pair of bf16 can be, and down loads until none is left. Every
block counts the runs in a word of its own. Run e uses half e % 2, of which every word is marked,
and marks the other half again: the run before is over, so nobody reads it any more.

Sums of a slot are formed in the order in which the decode kernel forms them.

Why it cannot hang. A gate/up warp refills a slot of its ring after it has read it, and waits for
copies that it started itself. Partial sums have two buffers: a gate/up warp waits for the service
warp to empty one, the service warp for all gate/up warps to fill it, and all take the same sequence
of tiles. So gate/up of a block waits for nothing outside the block, nor for its down warps. These
wait for a gate/up tile of the block, for a copy that they started, and for gate/up of all blocks,
which are all resident: one a multiprocessor, no more blocks than multiprocessors.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_chunks import multiply_groups, zeros
from k3jax.ops.experts.kernel_units import expert_at
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
        stages: slots of a gate/up warp's ring.
        down_warps: warps for down; each holds the block's rows of an expert.
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
    down_warps: int
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
        """Gate/up warps, two service warps, down warps."""
        return 32 * (self.warps + 2 + self.down_warps)

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
    def max_tiles(self) -> int:
        """Most gate/up row tiles of a block."""
        return -(-self.top_k * self.num_tiles // self.num_blocks)

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
        barriers = self.warps * self.stages + 4 + self.down_warps + self.max_tiles
        return _aligned(8 * barriers)

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
        """Shared memory of each down warp's hidden values."""
        return _aligned(self.token_offset + 2 * self.latent)

    @property
    def down_offset(self) -> int:
        """Shared memory of each down warp's weights."""
        return _aligned(self.hidden_offset + self.down_warps * 2 * self.inner)

    @property
    def ring_offset(self) -> int:
        """Shared memory of the rings: a stage of all gate/up warps, then the next."""
        return _aligned(self.down_offset + self.down_warps * self.job_bytes)

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
        run = ptx.load_global(runs + Int64(block) * 4)
        words = self.load_token(z, warp)
        experts, slots, count = self.find_units(ids)
        total = count * self.num_tiles
        # Every num_blocks-th tile: units are complete one after another, not all at the end.
        tiles = (total - block + self.num_blocks - 1) // self.num_blocks
        work = (experts, block, tiles)
        if warp < self.warps:
            if lane == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    ptx.barrier_init(self.full(shared, warp, stage), 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            for stage in cutlass.range_constexpr(self.stages):
                if stage < tiles:
                    self.copy(shared, gate_up, work, Int32(stage), warp)
            ptx.store_shared_4(self.token(shared, warp) + Uint32(lane * 16), words)
        else:
            self.init_barriers(shared, warp - self.warps)
            if warp == self.warps:
                self.keep_gains(shared, weights, ids)
        cute.arch.sync_threads()

        half = hidden + Int64((run & 1) * self.hidden_bytes)
        if warp < self.warps:
            self.compute(shared, gate_up, work, warp)
        elif warp < self.warps + 2:
            other = hidden + Int64((run & 1 ^ 1) * self.hidden_bytes)
            self.serve(shared, half, other, slots, work, warp - self.warps)
        else:
            self.take_slots(shared, down, half, ids, work, warp - (self.warps + 2))
        cute.arch.sync_threads()
        if cutlass.const_expr(self.weighted):
            self.combine(shared, out)
        else:
            self.write_rows(shared, out)
        if thread == 0:
            ptx.store_global(runs + Int64(block) * 4, Uint32(run + 1))

    @cute.jit
    def init_barriers(self, shared: Uint32, warp: Int32):
        """The barriers that the block shares, each by a lane of the warps that copy nothing yet."""
        if cute.arch.lane_idx() == 0:
            if warp == 0:
                for buffer in cutlass.range_constexpr(2):
                    ptx.barrier_init_warps(self.summed(shared, buffer), self.warps)
                    ptx.barrier_init_warps(self.drained(shared, buffer), 1)
                for tile in cutlass.range(self.max_tiles, unroll=1):
                    ptx.barrier_init_warps(self.landed(shared, tile), 1)
            elif warp >= 2:
                ptx.barrier_init(self.down_full(shared, warp - 2), 1)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def load_id(self, ids: Int64) -> Int32:
        """The expert of this lane's slot, or -1."""
        return expert_at(ids, cute.arch.lane_idx(), Int32(self.top_k), self.num_experts)

    @cute.jit
    def find_units(self, ids: Int64):
        """Expert and slot of this lane's unit, and the number of units."""
        lane = cute.arch.lane_idx()
        expert = self.load_id(ids)
        taken = Uint32(cute.arch.vote_ballot_sync(expert >= 0))
        count = Int32(cute.arch.popc(taken))
        left, slot = lane, Int32(0)
        for step in cutlass.range_constexpr(5):
            half = 16 >> step
            below = Int32(cute.arch.popc((taken >> Uint32(slot)) & Uint32((1 << half) - 1)))
            if left >= below:
                left -= below
                slot += half
        return cute.arch.shuffle_sync(expert, slot), slot, cute.arch.make_warp_uniform(count)

    def full(self, shared, warp, stage):
        """Barrier: the warp's slot has landed."""
        return shared + Uint32((warp * self.stages + stage) * 8)

    def summed(self, shared, buffer):
        """Barrier: every compute warp has stored its partial sums."""
        return shared + Uint32((self.warps * self.stages + buffer) * 8)

    def drained(self, shared, buffer):
        """Barrier: the service warp has read the partial sums."""
        return shared + Uint32((self.warps * self.stages + 2 + buffer) * 8)

    def landed(self, shared, tile):
        """Barrier: the block's gate/up tile has landed."""
        place = self.warps * self.stages + 4 + self.down_warps + tile
        return shared + Uint32(place * 8)

    def down_full(self, shared, warp):
        """Barrier: the weights of the down warp's slot have landed."""
        return shared + Uint32((self.warps * self.stages + 4 + warp) * 8)

    def down_at(self, shared, warp):
        """A down warp's weights."""
        return shared + Uint32(self.down_offset + warp * self.job_bytes)

    def slot(self, shared, warp, stage):
        """A slot of a warp's ring."""
        return shared + Uint32(self.ring_offset + stage * self.tile_bytes + warp * _GROUP_BYTES)

    def token(self, shared, warp):
        """A warp's slice of the token."""
        return shared + Uint32(self.token_offset + warp * (2 * GROUP_SIZE))

    def partial(self, shared, buffer, warp):
        """A warp's 16 sums."""
        return shared + Uint32(self.partials_offset + (buffer * self.warps + warp) * _SUMS_BYTES)

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
    def keep_gains(self, shared: Uint32, weights: Int64, ids: Int64):
        """One warp: the slots' weights, and which slots have an expert."""
        lane = cute.arch.lane_idx()
        taken = Uint32(cute.arch.vote_ballot_sync(self.load_id(ids) >= 0))
        gains = shared + Uint32(self.gains_offset)
        if lane < self.top_k:
            gain = ptx.load_global(weights + Int64(lane) * 4)
            ptx.store_shared(gains + Uint32(lane * 4), gain)
        if lane == 0:
            ptx.store_shared(gains + Uint32(4 * MAX_SLOTS), Int32(taken))

    @cute.jit
    def taken(self, shared: Uint32) -> Uint32:
        """Which slots have an expert, a bit each."""
        return Uint32(ptx.load_shared(shared + Uint32(self.gains_offset + 4 * MAX_SLOTS)))

    @cute.jit
    def copy(self, shared: Uint32, gate_up: Int64, work, index: Int32, warp: Int32):
        """Starts the copy of the warp's slice of the block's tile `index`."""
        experts, block, _ = work
        tile = block + index * self.num_blocks
        expert = cute.arch.make_warp_uniform(
            cute.arch.shuffle_sync(experts, tile // self.num_tiles)
        )
        if cute.arch.lane_idx() == 0:
            stage = index % self.stages
            full, target = self.full(shared, warp, stage), self.slot(shared, warp, stage)
            row = Int64(expert) * self.num_tiles + tile % self.num_tiles
            source = gate_up + row * self.tile_bytes + warp * _GROUP_BYTES
            ptx.barrier_expect(full, Int32(_GROUP_BYTES))
            ptx.bulk_copy(target, source, Int32(_GROUP_BYTES), full, ptx.evict_first_policy())

    @cute.jit
    def compute(self, shared, gate_up, work, warp):
        """A compute warp's slice of L of every tile of the block."""
        lane = cute.arch.lane_idx()
        _, _, tiles = work
        column = self.token(shared, warp) + Uint32(lane % 4 * 32)
        for index in cutlass.range(tiles):
            stage, phase = index % self.stages, Uint32(index // self.stages) & Uint32(1)
            # By bits: as divisions, they would become loop variables, and registers.
            buffer, emptied = index & 1, (Uint32(index >> 1) & Uint32(1)) ^ Uint32(1)
            ptx.barrier_wait(self.full(shared, warp, stage), phase)
            if (warp == 0) & ptx.arrives(lane):
                ptx.barrier_arrive(self.landed(shared, index))
            sums = zeros(8, Float32)
            multiply_groups([self.slot(shared, warp, stage)], column, [sums], GROUP_CHUNKS)
            ptx.barrier_wait(self.drained(shared, buffer), emptied)
            if lane % 4 == 0:
                place = self.partial(shared, buffer, warp) + Uint32(lane)
                ptx.store_shared_float(place, sums[0] + sums[4])
                ptx.store_shared_float(place + Uint32(32), sums[2] + sums[6])
            ptx.barrier_arrive_warp(self.summed(shared, buffer))
            if index + self.stages < tiles:
                self.copy(shared, gate_up, work, index + self.stages, warp)

    @cute.jit
    def serve(self, shared, half, other, slots, work, buffer):
        """A service warp: SiTU of every other tile, a neuron in each of eight lanes.

        The second also marks the block's share of the half that the next run uses.
        """
        lane = cute.arch.lane_idx()
        _, block, tiles = work
        if buffer == 1:
            for piece in cutlass.range(
                block * 32 + lane, self.hidden_bytes // 16, self.num_blocks * 32
            ):
                ptx.store_global_4(other + Int64(piece) * 16, Uint32(ptx.NOT_WRITTEN))
        neuron = lane % NEURONS
        stores = (lane < NEURONS) & (neuron % 2 == 0)
        phase = Uint32(0)
        for index in cutlass.range(buffer, tiles, 2):
            tile = block + index * self.num_blocks
            slot = cute.arch.shuffle_sync(slots, tile // self.num_tiles)
            ptx.barrier_wait(self.summed(shared, buffer), phase)
            phase = phase ^ Uint32(1)
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
    def take_slots(self, shared, down, half, ids, work, warp):
        """A down warp: its slots' rows, for the block's row tiles."""
        _, _, tiles = work
        lane = cute.arch.lane_idx()
        first, rows = self.down_share()
        expert_of_slot = self.load_id(ids)
        taken = Uint32(cute.arch.vote_ballot_sync(expert_of_slot >= 0))
        parity = Uint32(0)
        for begin in cutlass.range_constexpr(0, self.top_k, self.down_warps):
            slot = begin + warp
            expert = Int32(-1)
            if slot < self.top_k:
                expert = cute.arch.make_warp_uniform(cute.arch.shuffle_sync(expert_of_slot, slot))
            if (expert >= 0) & (rows > 0):
                unit = Int32(cute.arch.popc(taken & ((Uint32(1) << Uint32(slot)) - Uint32(1))))
                last = ((unit + 1) * self.num_tiles - 1) // self.num_blocks
                after = cutlass.min(last + 1, tiles - 1)
                if after >= 0:
                    ptx.barrier_wait(self.landed(shared, after), Uint32(0))
                if lane == 0:
                    source = down + (Int64(expert) * self.down_tiles + first) * self.down_bytes
                    full, num_bytes = self.down_full(shared, warp), rows * self.down_bytes
                    ptx.barrier_expect(full, num_bytes)
                    policy = ptx.evict_first_policy()
                    ptx.bulk_copy(self.down_at(shared, warp), source, num_bytes, full, policy)
                cute.arch.sync_warp()
                ptx.barrier_wait(self.down_full(shared, warp), parity)
                parity = parity ^ Uint32(1)
                self.take_hidden(shared, half, slot, warp)
                self.multiply(shared, slot, rows, warp)
                cute.arch.sync_warp()

    @cute.jit
    def take_hidden(self, shared: Uint32, half: Int64, slot: Int32, warp: Int32):
        """Brings a slot's hidden values into shared memory, once all are there."""
        lane = cute.arch.lane_idx()
        source = half + Int64(slot) * (2 * self.inner)
        target = shared + Uint32(self.hidden_offset + warp * (2 * self.inner))
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
    def multiply(self, shared: Uint32, slot: Int32, tiles: Int32, warp: Int32):
        """The block's row tiles of a slot; rounded, they stay in shared memory.

        A lane holds rows 2g and 2g + 1 of a tile; all columns are the token.
        """
        lane = cute.arch.lane_idx()
        column = shared + Uint32(self.hidden_offset + warp * (2 * self.inner) + lane % 4 * 32)
        weights = self.down_at(shared, warp)
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
        down_warps=16,
        beta=4.0,
        linear_beta=25.0,
        weighted=True,
    )
    for inner in (384, 192)
}
