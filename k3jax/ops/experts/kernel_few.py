"""Routed experts of a few tokens: gate/up and down as two launches that share multiprocessors.

With so few tokens a multiprocessor reads some 270 KB in all, so what counts is that the reading
starts at once and never pauses, and that little is left to do when the last byte lands. Blocks of
both launches fit a multiprocessor together (64 registers a thread, half of the shared memory), and
the second starts while the first still runs: its weights are on their way before it waits. Nothing
is prepared beforehand, and neither launch waits for another block of its own.

Units are distinct experts, and columns of the matrix instruction are tokens (`kernel_few_units`),
so operand B is the same for all units, and the routes need no sorting.

Gate/up. Blocks take equal contiguous shares of the row tiles (8 gate and the matching 8 up rows
over all of L) of all units. Compute warp w owns k = 256 w .. 256 w + 255: a ring of slots of its
own for that slice of the tiles, which it fills and reads alone, and that slice of the tokens in
shared memory. The warps' partial sums meet in shared memory, where two service warps, taking turns,
add them in warp order, apply SiTU and store the hidden values. When its first tile has landed, a
block lets the second launch start: earlier, the two launches' copies would share the memory's rate
for longer, and gate/up would be done later.

Down. A block holds the same few row tiles of every unit, so that it has all slots of each token
for its rows and adds them itself. A job is a unit: a warp copies its rows, waits for the first
launch to end, brings the unit's hidden values into shared memory, multiplies, and leaves rounded
rows in shared memory; at the end the block adds them in slot order, or writes them out.

Sums of a route depend on nothing but its token and expert, and are formed in the order in which the
decode kernel forms them.

Why it cannot hang. A compute warp refills a slot of its ring after it has read it, and waits for
copies that it started itself. Partial sums have two buffers: a compute warp waits for the service
warp to empty one, the service warp for all compute warps to fill it, and all take the same sequence
of tiles. The second launch waits for the first, which waits for nothing outside its block, and for
copies that its warps started themselves.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_chunks import multiply_chunk, zeros
from k3jax.ops.experts.kernel_few_units import UnitTable
from k3jax.ops.experts.packing import (
    CHUNK,
    CHUNK_BYTES,
    ELEMENT_BYTES,
    GROUP_CHUNKS,
    GROUP_SIZE,
    NEURONS,
    ROW_TILE,
    chunk_groups,
)
from k3jax.runtime.program import Kernel

MAX_TOKENS = 4
"""Most tokens: a warp that adds partial sums has a lane for each token's neuron of a tile."""
DOWN_WARPS = 16
"""Warps of a block of down: one unit each at one token of K3."""

_GROUP_BYTES = GROUP_CHUNKS * CHUNK_BYTES
_TOKEN_BYTES = 2 * GROUP_SIZE + 16
"""A warp's slice of a token, padded so that tokens lie in different banks."""
_COLUMN_BYTES = 80
"""A warp's sums of a token: 16 rows, padded so that the stores of a warp meet no bank twice."""


def _aligned(num_bytes):
    return -(-num_bytes // 128) * 128


@dataclass(frozen=True)
class FewGateUpKernel(UnitTable, Kernel):
    """hidden[t, s] = SiTU(z[t] gate, z[t] up) of expert ids[t, s], for leading routes.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        top_k: slots a token.
        max_tokens: most tokens of a launch, at most `MAX_TOKENS`.
        latent: L, a multiple of 256.
        inner: I of this rank, a multiple of 64.
        num_blocks: grid.
        stages: slots of a warp's ring.
        beta: soft cap of the gate.
        linear_beta: soft cap of the linear branch, or None.
    """

    latent: int
    inner: int
    num_blocks: int
    stages: int
    beta: float
    linear_beta: float | None

    parameters = (
        ("z", "address"),
        ("ids", "address"),
        ("gate_up", "address"),
        ("hidden", "address"),
        ("num_tokens", "int32"),
    )
    min_blocks = 2

    @property
    def warps(self) -> int:
        """Compute warps."""
        return self.latent // GROUP_SIZE

    @property
    def threads(self) -> int:
        """Compute warps and two service warps."""
        return 32 * (self.warps + 2)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return self.num_blocks, 1, 1

    @property
    def num_tiles(self) -> int:
        """Row tiles of an expert."""
        return self.inner // NEURONS

    @property
    def tile_bytes(self) -> int:
        """A row tile."""
        return self.warps * _GROUP_BYTES

    @property
    def table_offset(self) -> int:
        """Shared memory of the table, after the barriers."""
        return _aligned(8 * (self.warps * self.stages + 4))

    @property
    def partials_offset(self) -> int:
        """Shared memory of the partial sums, two sets."""
        return self.table_offset + self.num_bytes

    @property
    def tokens_offset(self) -> int:
        """Shared memory of the tokens, slice by slice."""
        sums = self.max_tokens * _COLUMN_BYTES
        return _aligned(self.partials_offset + 2 * self.warps * sums)

    @property
    def ring_offset(self) -> int:
        """Shared memory of the rings: a stage of all warps, then the next."""
        return _aligned(self.tokens_offset + self.warps * self.max_tokens * _TOKEN_BYTES)

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.ring_offset + self.stages * self.tile_bytes

    @cute.kernel
    def device(self, z: Int64, ids: Int64, gate_up: Int64, hidden: Int64, num_tokens: Int32):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = cute.arch.lane_idx()
        shared = ptx.kept(Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint()))
        table = shared + Uint32(self.table_offset)
        if warp == self.warps:
            self.make(table, ids, num_tokens)
        elif warp < self.warps:
            if lane == 0:
                for stage in cutlass.range_constexpr(self.stages):
                    ptx.barrier_init(self.full(shared, warp, stage), 1)
            self.load_tokens(shared, z, num_tokens, warp)
        elif lane == 0:
            for buffer in cutlass.range_constexpr(2):
                ptx.barrier_init_warps(self.summed(shared, buffer), self.warps)
                ptx.barrier_init_warps(self.drained(shared, buffer), 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        total = self.num_units(table) * self.num_tiles
        begin = total * block // self.num_blocks
        tiles = total * (block + 1) // self.num_blocks - begin
        if warp < self.warps:
            self.compute(shared, gate_up, begin, tiles, num_tokens, warp)
        else:
            self.serve(shared, hidden, begin, tiles, num_tokens, warp - self.warps)

    def full(self, shared, warp, stage):
        """Barrier: the warp's slot has landed."""
        return shared + Uint32((warp * self.stages + stage) * 8)

    def summed(self, shared, buffer):
        """Barrier: every compute warp has stored its partial sums."""
        return shared + Uint32((self.warps * self.stages + buffer) * 8)

    def drained(self, shared, buffer):
        """Barrier: the service warp has read the partial sums."""
        return shared + Uint32((self.warps * self.stages + 2 + buffer) * 8)

    def slot(self, shared, warp, stage):
        """A slot of a warp's ring."""
        return shared + Uint32(self.ring_offset + stage * self.tile_bytes + warp * _GROUP_BYTES)

    def token(self, shared, warp, token):
        """A warp's slice of a token."""
        place = self.tokens_offset + (warp * self.max_tokens + token) * _TOKEN_BYTES
        return shared + Uint32(place)

    def partial(self, shared, buffer, warp, token):
        """A warp's 16 sums of a token."""
        place = ((buffer * self.warps + warp) * self.max_tokens + token) * _COLUMN_BYTES
        return shared + Uint32(self.partials_offset + place)

    @cute.jit
    def load_tokens(self, shared: Uint32, z: Int64, num_tokens: Int32, warp: Int32):
        """Brings a warp's slice of each token into shared memory."""
        lane = cute.arch.lane_idx()
        source = z + Int64(warp * (2 * GROUP_SIZE) + lane * 16)
        for token in cutlass.range(num_tokens):
            words = ptx.load_global_4(source + Int64(token) * (2 * self.latent))
            ptx.store_shared_4(self.token(shared, warp, token) + Uint32(lane * 16), words)

    @cute.jit
    def copy(self, shared: Uint32, gate_up: Int64, tile: Int32, warp: Int32, stage: Int32):
        """Starts the copy of a warp's slice of a tile."""
        # What is known to be the same for all lanes needs no loop over them for a copy.
        expert = cute.arch.make_warp_uniform(
            self.expert(shared + Uint32(self.table_offset), tile // self.num_tiles)
        )
        row = Int64(expert) * self.num_tiles + tile % self.num_tiles
        source = gate_up + row * self.tile_bytes + warp * _GROUP_BYTES
        full, target = self.full(shared, warp, stage), self.slot(shared, warp, stage)
        policy = ptx.evict_first_policy()
        if cute.arch.lane_idx() == 0:
            ptx.barrier_expect(full, Int32(_GROUP_BYTES))
            ptx.bulk_copy(target, source, Int32(_GROUP_BYTES), full, policy)

    @cute.jit
    def compute(self, shared, gate_up, begin, tiles, num_tokens, warp):
        """A compute warp's slice of L of every tile of the block."""
        lane = cute.arch.lane_idx()
        for stage in cutlass.range(cutlass.min(self.stages, tiles), unroll=1):
            self.copy(shared, gate_up, begin + stage, warp, stage)
        cute.arch.sync_warp()
        # Columns past the tokens repeat the last one; their sums are dropped.
        column = cutlass.min(lane // 4, num_tokens - 1)
        columns = self.token(shared, warp, column) + Uint32(lane % 4 * 32)
        for index in cutlass.range(tiles):
            stage, phase = index % self.stages, Uint32(index // self.stages) & Uint32(1)
            # By bits: as divisions, they would become loop variables, and registers.
            buffer, emptied = index & 1, (Uint32(index >> 1) & Uint32(1)) ^ Uint32(1)
            ptx.barrier_wait(self.full(shared, warp, stage), phase)
            if index == 0:
                cute.arch.griddepcontrol_launch_dependents()
            sums = zeros(8, Float32)
            multiply([self.slot(shared, warp, stage)], columns, [sums], GROUP_CHUNKS)
            ptx.barrier_wait(self.drained(shared, buffer), emptied)
            self.store_partial(shared, buffer, warp, sums)
            cute.arch.sync_warp()
            if ptx.arrives(lane):
                ptx.barrier_arrive(self.summed(shared, buffer))
            if index + self.stages < tiles:
                self.copy(shared, gate_up, begin + index + self.stages, warp, stage)

    @cute.jit
    def store_partial(self, shared: Uint32, buffer: Int32, warp: Int32, sums: cute.Tensor):
        """A warp's sums of the tokens. A lane holds two columns of rows g and g + 8."""
        lane = cute.arch.lane_idx()
        for side in cutlass.range_constexpr(2):
            token = lane % 4 * 2 + side
            if token < self.max_tokens:
                place = self.partial(shared, buffer, warp, token) + Uint32(lane // 4 * 4)
                ptx.store_shared_float(place, sums[side] + sums[side + 4])
                ptx.store_shared_float(place + Uint32(32), sums[side + 2] + sums[side + 6])

    @cute.jit
    def serve(self, shared, hidden, begin, tiles, num_tokens, buffer):
        """A service warp: SiTU of every other tile, a neuron of a token in each lane."""
        lane = cute.arch.lane_idx()
        token, neuron = cutlass.min(lane // NEURONS, num_tokens - 1), lane % NEURONS
        stores = (lane // NEURONS < num_tokens) & (neuron % 2 == 0)
        phase = Uint32(0)
        for index in cutlass.range(buffer, tiles, 2):
            tile = begin + index
            unit = tile // self.num_tiles
            route = self.route(shared + Uint32(self.table_offset), unit, token)
            ptx.barrier_wait(self.summed(shared, buffer), phase)
            phase = phase ^ Uint32(1)
            pair = self.add_partials(shared, buffer, token, neuron)
            place = Int64(route) * self.inner + (tile % self.num_tiles * NEURONS + neuron)
            if stores & (route >= 0):
                ptx.store_global(hidden + place * 2, pair)

    @cute.jit
    def add_partials(self, shared: Uint32, buffer: Int32, token: Int32, neuron: Int32) -> Uint32:
        """A neuron and its right neighbour: sums over the warps, rounded, and SiTU, rounded."""
        gate, up = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(self.warps):
            place = self.partial(shared, buffer, warp, token) + Uint32(neuron * 4)
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


@dataclass(frozen=True)
class FewDownKernel(UnitTable, Kernel):
    """sum over slots of weights[t, s] * hidden[t, s] down, or the unweighted rows.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        top_k: slots a token.
        max_tokens: most tokens of a launch, at most `MAX_TOKENS`.
        latent: L, a multiple of 16.
        inner: I of this rank, a multiple of 64.
        max_blocks: most blocks of the grid.
        warps: of a block; each has one job's weights on their way.
        weighted: write the weighted sum [T, L] rather than rows [T, top_k, L].
    """

    latent: int
    inner: int
    max_blocks: int
    warps: int
    weighted: bool

    parameters = (
        ("ids", "address"),
        ("weights", "address"),
        ("down", "address"),
        ("hidden", "address"),
        ("out", "address"),
        ("num_tokens", "int32"),
    )
    min_blocks = 2

    @property
    def threads(self) -> int:
        """All take jobs."""
        return 32 * self.warps

    @property
    def num_tiles(self) -> int:
        """Row tiles of an expert."""
        return self.latent // ROW_TILE

    @property
    def block_tiles(self) -> int:
        """Row tiles of a block."""
        return -(-self.num_tiles // self.max_blocks)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return -(-self.num_tiles // self.block_tiles), 1, 1

    @property
    def tile_bytes(self) -> int:
        """A row tile."""
        return self.inner // CHUNK * CHUNK_BYTES

    @property
    def row_bytes(self) -> int:
        """The block's part of a row."""
        return self.block_tiles * 2 * ROW_TILE

    @property
    def table_offset(self) -> int:
        """Shared memory of the table, after the barriers."""
        return _aligned(8 * self.warps)

    @property
    def gains_offset(self) -> int:
        """Shared memory of the routes' weights."""
        return self.table_offset + self.num_bytes

    @property
    def rows_offset(self) -> int:
        """Shared memory of the rows; one more, of zeros, is that of dropped routes."""
        return _aligned(self.gains_offset + 4 * self.max_routes)

    @property
    def hidden_offset(self) -> int:
        """Shared memory of each warp's hidden values, token by token."""
        return _aligned(self.rows_offset + (self.max_routes + 1) * self.row_bytes)

    @property
    def ring_offset(self) -> int:
        """Shared memory of each warp's weights."""
        return _aligned(self.hidden_offset + self.warps * self.max_tokens * 2 * self.inner)

    @property
    def job_bytes(self) -> int:
        """The block's weights of a unit."""
        return self.block_tiles * self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.ring_offset + self.warps * self.job_bytes

    @cute.kernel
    def device(
        self,
        ids: Int64,
        weights: Int64,
        down: Int64,
        hidden: Int64,
        out: Int64,
        num_tokens: Int32,
    ):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = cute.arch.lane_idx()
        shared = ptx.kept(Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint()))
        table = shared + Uint32(self.table_offset)
        if warp == 0:
            self.make(table, ids, num_tokens)
        elif warp == 1:
            self.load_gains(shared, weights, num_tokens)
        if lane == 0:
            ptx.barrier_init(self.full(shared, warp), 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        num_units = self.num_units(table)
        first = block * self.block_tiles
        tiles = cutlass.min(self.block_tiles, self.num_tiles - first)
        if (lane == 0) & (warp < num_units):
            self.copy(shared, down, warp, first, tiles, warp)
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        phase = Uint32(0)
        for unit in cutlass.range(warp, num_units, self.warps):
            self.take_hidden(shared, hidden, unit, warp)
            ptx.barrier_wait(self.full(shared, warp), phase)
            phase = phase ^ Uint32(1)
            self.multiply(shared, unit, tiles, warp)
            cute.arch.sync_warp()
            if (lane == 0) & (unit + self.warps < num_units):
                self.copy(shared, down, unit + self.warps, first, tiles, warp)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.weighted):
            self.combine(shared, out, first, tiles, num_tokens)
        else:
            self.write_rows(shared, out, first, tiles, num_tokens)

    def full(self, shared, warp):
        """Barrier: the weights of the warp's job have landed."""
        return shared + Uint32(warp * 8)

    def row(self, shared, route):
        """The block's part of a route's row; that of route -1 is zeros, after all others."""
        return shared + Uint32(self.rows_offset + (route + 1) * self.row_bytes)

    def hidden_at(self, shared, warp, token):
        """A warp's hidden values of a token."""
        place = (warp * self.max_tokens + token) * (2 * self.inner)
        return shared + Uint32(self.hidden_offset + place)

    def weights_at(self, shared, warp):
        """A warp's weights."""
        return shared + Uint32(self.ring_offset + warp * self.job_bytes)

    @cute.jit
    def load_gains(self, shared: Uint32, weights: Int64, num_tokens: Int32):
        """One warp: the routes' weights, and the row of zeros."""
        lane = cute.arch.lane_idx()
        for route in cutlass.range(lane, num_tokens * self.top_k, 32):
            gain = ptx.load_global(weights + Int64(route) * 4)
            ptx.store_shared(shared + Uint32(self.gains_offset + route * 4), gain)
        for word in cutlass.range(lane, self.row_bytes // 4, 32):
            ptx.store_shared(self.row(shared, -1) + Uint32(word * 4), Int32(0))

    @cute.jit
    def copy(self, shared, down, unit, first, tiles, warp):
        """One lane: starts the copy of the block's row tiles of a unit."""
        expert = self.expert(shared + Uint32(self.table_offset), unit)
        source = down + (Int64(expert) * self.num_tiles + first) * self.tile_bytes
        full, num_bytes = self.full(shared, warp), tiles * self.tile_bytes
        ptx.barrier_expect(full, num_bytes)
        target = self.weights_at(shared, warp)
        ptx.bulk_copy(target, source, num_bytes, full, ptx.evict_first_policy())

    @cute.jit
    def take_hidden(self, shared: Uint32, hidden: Int64, unit: Int32, warp: Int32):
        """Brings the hidden values of the unit's tokens into shared memory."""
        lane = cute.arch.lane_idx()
        pieces = self.inner // 8
        for token in cutlass.range(self.max_tokens):
            route = self.route(shared + Uint32(self.table_offset), unit, token)
            if route >= 0:
                source = hidden + Int64(route) * (2 * self.inner)
                target = self.hidden_at(shared, warp, token)
                for piece in cutlass.range(lane, pieces, 32, unroll=2):
                    words = ptx.load_global_4(source + piece * 16)
                    ptx.store_shared_4(target + Uint32(piece * 16), words)
        cute.arch.sync_warp()

    @cute.jit
    def multiply(self, shared: Uint32, unit: Int32, tiles: Int32, warp: Int32):
        """The block's row tiles of a unit, for its tokens; rounded, they stay in shared memory.

        A lane holds rows 2g and 2g + 1 of a tile for two columns; lane 4c knows column c's route.
        Columns without a route repeat the unit's first token; their sums are dropped.
        """
        lane = cute.arch.lane_idx()
        table = shared + Uint32(self.table_offset)
        token, route = lane // 4, Int32(-1)
        if token < self.max_tokens:
            route = self.route(table, unit, token)
        if route < 0:
            token = self.first_route(table, unit) // self.top_k
        columns = self.hidden_at(shared, warp, token) + Uint32(lane % 4 * 32)
        weights = self.weights_at(shared, warp)
        # Two tiles at a time; where there is one more, it takes both places.
        for tile in cutlass.range(0, tiles, 2, unroll=1):
            pair = (tile, cutlass.min(tile + 1, tiles - 1))
            sums = [zeros(8, Float32) for _ in pair]
            first = 0
            for size in chunk_groups(self.inner // CHUNK):
                places = [one * self.tile_bytes + first * CHUNK_BYTES for one in pair]
                groups = [weights + Uint32(place) for place in places]
                multiply(groups, columns + Uint32(first * 2 * CHUNK), sums, size)
                first += size
            for side in cutlass.range_constexpr(2):
                target = cute.arch.shuffle_sync(route, lane % 4 * 8 + side * 4)
                if target >= 0:
                    for one, of in zip(pair, sums, strict=True):
                        low, high = of[side] + of[side + 4], of[side + 2] + of[side + 6]
                        place = self.row(shared, target) + Uint32(lane // 4 * 4)
                        place = place + Uint32(one * (2 * ROW_TILE))
                        ptx.store_shared(place, ptx.round_pair(low, high))

    @cute.jit
    def combine(self, shared: Uint32, out: Int64, first: Int32, tiles: Int32, num_tokens: Int32):
        """out[t, the block's rows] = sum of weights[t, s] * row[t, s] over slots in order."""
        thread, _, _ = cute.arch.thread_idx()
        table = shared + Uint32(self.table_offset)
        words = tiles * (ROW_TILE // 2)
        for index in cutlass.range(thread, num_tokens * words, self.threads):
            token, word = index // words, index % words
            low, high = Float32(0.0), Float32(0.0)
            for slot in cutlass.range_constexpr(self.top_k):
                route = token * self.top_k + slot
                leading = self.leading(table, route)
                gain = ptx.load_shared_float(shared + Uint32(self.gains_offset + route * 4))
                # Loaded whether there is a row or not, so that no load waits for another.
                pair = Uint32(ptx.load_shared(self.row(shared, leading) + Uint32(word * 4)))
                if leading >= 0:
                    low = ptx.fused(gain, ptx.low_float(pair), low)
                    high = ptx.fused(gain, ptx.high_float(pair), high)
            place = (Int64(token) * self.latent + first * ROW_TILE) * 2 + word * 4
            ptx.store_global(out + place, ptx.round_pair(low, high))

    @cute.jit
    def write_rows(self, shared: Uint32, out: Int64, first: Int32, tiles: Int32, num_tokens: Int32):
        """The block's part of every route's row, zeros where the id was dropped."""
        thread, _, _ = cute.arch.thread_idx()
        words = tiles * (ROW_TILE // 2)
        for index in cutlass.range(thread, num_tokens * self.top_k * words, self.threads):
            route, word = index // words, index % words
            leading = self.leading(shared + Uint32(self.table_offset), route)
            pair = Uint32(ptx.load_shared(self.row(shared, leading) + Uint32(word * 4)))
            place = (Int64(route) * self.latent + first * ROW_TILE) * 2 + word * 4
            ptx.store_global(out + place, pair)


def multiply(groups, columns, sums, chunks):
    """sums += each group of weights times columns: two chains of instructions a group.

    Args:
        groups: shared addresses of groups of packed weights.
        columns: shared address of this lane's part of its column, where the groups begin.
        sums: 8 registers for each group.
        chunks: of a group.
    """
    lane = cute.arch.lane_idx()
    elements = [group + Uint32(lane * 16) for group in groups]
    offset = chunks * ELEMENT_BYTES + lane // 2 * (2 * chunks)
    places = [group + Uint32(offset) for group in groups]
    every = Uint32(0)
    for place in places:
        for word in ptx.load_scales(place, chunks):
            every = every | word
    large = ptx.any_lane(every & Uint32(0x80808080))
    _multiply(elements, places, columns, sums, chunks, large)


@cute.jit
def _multiply(elements, places, columns: Uint32, sums, chunks: cutlass.Constexpr, large: Int32):
    """The groups' matrix instructions; `large` is 1 if some scale byte is 128 or more, else 0.

    2^126 times such a scale is past bfloat16, so it takes a second multiply, in a loop of `large`
    rounds over volatile loads, for the reason that the decode kernel gives. Scales are loaded once
    more where they are used, and columns for each chunk: half of a multiprocessor has no registers
    to keep them in.
    """
    for _ in cutlass.range(large, unroll=1):
        for element, scale, chains in zip(elements, places, sums, strict=True):
            for chunk in cutlass.range_constexpr(chunks):
                place = columns + Uint32(chunk * (2 * CHUNK))
                halves = [ptx.load_shared_volatile_4(place + Uint32(16 * i)) for i in range(2)]
                both = ptx.load_shared_volatile_half(scale + Uint32(2 * chunk))
                factors = [ptx.scale_value(ptx.spread_byte(both, row)) for row in range(2)]
                words = ptx.load_shared_volatile_4(element + Uint32(chunk * ELEMENT_BYTES))
                ones, held = [Uint32(ptx.ONES)] * 2, [*halves[0], *halves[1]]
                multiply_chunk(words, ones, factors, held, 0, chains, 0)
    if large == 0:
        every = [ptx.load_scales(scale, chunks) for scale in places]
        for chunk in cutlass.range_constexpr(chunks):
            place = columns + Uint32(chunk * (2 * CHUNK))
            held = [*ptx.load_shared_4(place), *ptx.load_shared_4(place + Uint32(16))]
            for element, scales, chains in zip(elements, every, sums, strict=True):
                factors = [ptx.power_of_byte(scales, 2 * chunk + row) for row in range(2)]
                words = ptx.load_shared_4(element + Uint32(chunk * ELEMENT_BYTES))
                multiply_chunk(words, factors, None, held, 0, chains, 0)


_K3 = {"num_experts": 896, "top_k": 16, "max_tokens": 1, "latent": 3584}

REPRESENTATIVES = {
    f"few, 1 token, TP={3072 // inner}, {name}": kernel
    for inner in (384, 192)
    for name, kernel in (
        (
            "gate/up",
            FewGateUpKernel(
                **_K3, inner=inner, num_blocks=132, stages=3, beta=4.0, linear_beta=25.0
            ),
        ),
        ("down", FewDownKernel(**_K3, inner=inner, max_blocks=132, warps=16, weighted=True)),
    )
}
