"""The fused tail on one rank: the exchange, the norm, the up-projection and the shared add.

`docs/protocol.md` says what crosses between ranks and why it is right; here is how a rank does it.

Schedule. The grid is `groups` clusters of `k_blocks` blocks, at most one block a multiprocessor,
and one launch does everything. Block b of cluster g owns slice b of the latent (L / k_blocks
columns) and, with its cluster, share g of the rank's rows of the up-projection.

- At entry the last warps start bulk copies of the block's weights into shared memory, tile by tile,
  before `griddepcontrol.wait`: nothing on the device writes weights. Bulk copies, because 57 KB of
  loads would fill the queue that every other access of the multiprocessor goes through. Starting
  one takes 17 ns, 4 us for all at TP=2, so nobody waits for these warps before the norm is done;
  that is why the header, which one warp loads, is handed to the others by a barrier of its own.
  Every lane loads what else depends on nothing: its first piece of the partials and its part of the
  norm's gain. With more than 8 tokens at TP=2, shared memory cannot hold all weights; the rest goes
  into registers after the norm.
- Up to 8 tokens, where a block has 4 row tiles or more (TP=2, 4, 8), weights are streamed, and the
  copies have warps of their own. A few tiles are on their way at a time: with 200 KB in flight a
  load of anything else takes up to 5 us, and an exchange takes several. Each warp multiplies its
  tile as it lands and sends its sums on from registers. Other warps finish the columns of 4 tiles
  each as soon as these are complete, so that after the last tile only the last columns are left to
  do: what counts is when the last words leave for the other ranks, since the kernel is over 1.3 us
  later, when they have arrived. At TP=2 there are as many tiles as warps: the first warps take two
  each, whose loads of tokens they share, and the last tile takes the place of the first. (Registers
  for what has no place cost 1.5 us: their loads come last and hold up those behind them.)
- All blocks publish to the other ranks: partial latents (or the weighted sum of the unfinalised
  rows) and slices of the shared partial, spread over the grid by warps. Then the upper half of the
  warps re-arms the previous slot, while the lower one polls. What a rank needs of its own partials
  it reads where they are; only weighed rows and finished ones take the way through its own mailbox.
- Reduce: a lane polls 8 columns of one row in the mailboxes of all ranks at once, adds in rank
  order and leaves m in shared memory. Sums of squares go to all blocks of the cluster (distributed
  shared memory), which add them in one order. In one shot every cluster does every row, its
  block b only slice b, so n is where the product wants it. In two shots cluster g does rows
  g, g + groups, .. of those that the rank owns and stores n to all ranks; then every block
  polls its slice of all rows. Weights that are not streamed are read into registers meanwhile,
  where these have room.
- Project: m16n8k16 with 16 weight rows as A and 8 tokens as B. A lane's 16 bytes are 8 adjacent k
  of a row, where the instruction wants 2 + 2 at distance 8; as weights and latents are permuted
  alike, the sum over k is the same and nothing is shuffled. The warps' sums (added up, if warps
  share a tile) go to the block of the cluster that finishes the token, which adds them in order,
  rounds, adds the shared partials (looked at before the product; polled after it, or before the
  weights are here), writes its columns of the result and publishes them to the other ranks. Tokens
  are taken in rounds, on two buffers.
- Gather: every lane polls its pieces of the other ranks' columns and writes the result. Before that
  one thread counts the block; the last block moves the header on. Nobody waits for this atomic.

Blocks of a cluster hand each other float32 by `st.async`, counted on the receiver's barrier. A
cluster barrier would do, but one that releases the stores waits until everything that a thread has
stored, to other ranks too, has arrived: it costs more than the product.

Why it cannot hang. Blocks wait for words that blocks of the same phase or an earlier one store, on
this rank or another; phases are in one order in every block, and publishing waits for nothing. All
blocks are resident, so all of them get there. A tile that takes another one's place waits for that
one's product, which waits for copies that wait for no place, and for no warp that finishes columns.
How many bytes blocks of a cluster expect of one another depends on T alone, and nobody leaves
before it has its own. A rank that does not come ends every poll by its budget (`give_up`); what a
failure means for later calls is in docs/protocol.md.

In a loopback launch the grid's second axis is the rank and `workspace_stride` the distance between
the ranks' workspaces and there is no peer; everything else is the same code.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.geometry import (
    FINISH_TILES,
    STEP,
    TILE_ROWS,
    kernel_facts,
)
from k3jax.ops.tail.kernel_exchange import SQUARES, SUMS, add_pairs, scaled
from k3jax.ops.tail.kernel_weights import Weights
from k3jax.runtime.program import Kernel
from k3jax.runtime.workspace import EPOCH_WORD, RANK_WORD, SLOTS

POLLED_LOADS = 8
"""Most loads of 16 bytes that a lane has in flight while it polls partial latents."""
STAGED_LOADS = 4
"""The same for finished rows."""


@dataclass(frozen=True)
class TailKernel(Weights, Kernel):
    """y = r(r(n W^T) + s), exchanged through mailboxes; `TailGeometry` holds the static facts."""

    parameters = (
        ("latent", "address"),  # [T, L], or [T, K, L]
        ("weights", "address"),  # float32 [T, K]; not read if finalised
        ("ids", "address"),  # int32 [T, K]; not read if finalised
        ("shared", "address"),  # [T, H]
        ("gain", "address"),  # [L]
        ("up_proj", "address"),  # rows of the up-projection, L each
        ("out", "address"),
        ("workspace", "address"),
        ("workspace_stride", "int32"),  # bytes from one rank's to the next; loopback only
        ("num_tokens", "int32"),
        ("up_proj_stride", "int32"),  # rows of up_proj before rank r's: r times this
        ("budget", "int32"),  # polls of a lane before it gives up
        ("eps", "float32"),
    )
    min_blocks = 1  # more would spill registers, and shared memory holds no second block

    @cute.kernel
    def device(
        self,
        latent: Int64,
        weights: Int64,
        ids: Int64,
        shared: Int64,
        gain: Int64,
        up_proj: Int64,
        out: Int64,
        workspace: Int64,
        workspace_stride: Int32,
        num_tokens: Int32,
        up_proj_stride: Int32,
        budget: Int32,
        eps: Float32,
    ):
        """One block of the schedule above."""
        _, rank_here, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        own = workspace + Int64(rank_here) * Int64(workspace_stride)
        arrays = (latent, weights, ids, shared)

        self.make_barriers(smem)
        words.cluster_arrive()
        arguments = (gain, up_proj, out, own, up_proj_stride, num_tokens, budget, eps, smem)
        if cutlass.const_expr(self.streams):
            if thread >= self.workers:
                self.fetch_weights(up_proj, own, up_proj_stride, smem)
                cute.arch.sync_warp()
                words.cluster_wait()
            else:
                self.work(arrays, *arguments)
        else:
            self.fetch_weights(up_proj, own, up_proj_stride, smem)
            self.work(arrays, *arguments)

    @cute.jit
    def work(
        self, arrays, gain, up_proj, out, own, up_proj_stride, num_tokens, budget, eps, smem
    ):  # fmt: skip
        """All that a thread does but for starting copies of weights."""
        thread, _, _ = cute.arch.thread_idx()
        latent, weights, ids, shared = arrays
        latent = self.own_part(
            latent, num_tokens, self.latent_size * max(self.experts_per_token, 1)
        )
        sources = (latent, weights, ids, self.own_part(shared, num_tokens, self.hidden_size))
        cute.arch.griddepcontrol_wait()
        header = cute.make_rmem_tensor((2,), Uint32)
        self.load_header(own, header)
        piece = cute.make_rmem_tensor((4,), Uint32)
        self.load_piece(sources, self.spread_thread(), num_tokens, piece)
        factors = self.load_gain(gain)
        cute.arch.griddepcontrol_launch_dependents()
        self.share_header(header, smem)
        epoch, _, previous, failed = ptx.load_shared_4(smem + Uint32(EPOCH_WORD * 4))
        rank = ptx.load_shared(smem + Uint32(RANK_WORD * 4))
        if (failed != Uint32(0)) & (failed != epoch + Uint32(1)):
            self.arrive(own, epoch, num_tokens)
            self.fill_with_nan(self.own_part(out, num_tokens, self.result_width), num_tokens)
            if thread < self.tiles - self.slots:  # copies wait for these places
                ptx.barrier_arrive(self.freed(thread, smem))
            for tile in cutlass.range(self.tiles):
                self.wait_for_weights(tile, smem)
            words.cluster_wait()
        else:
            slot = Int32(epoch % Uint32(SLOTS))
            self.publish(sources, piece, rank, slot, num_tokens, smem)
            if (epoch != Uint32(0)) & (thread >= self.workers // 2):
                self.rearm(own, rank, (slot + SLOTS - 1) % SLOTS, Int32(previous))
            words.cluster_wait()
            kept = cute.make_rmem_tensor((8 * self.steps,), Uint32)
            left = self.reduce(
                own, latent, factors, kept, rank, slot, num_tokens, epoch, budget, eps, smem
            )
            held = self.load_weights(up_proj, rank * up_proj_stride)
            out = self.own_part(out, num_tokens, self.result_width)
            shared = self.own_part(shared, num_tokens, self.hidden_size)
            left = self.project(
                own, shared, out, held, kept, rank, slot, num_tokens, epoch, left, smem
            )
            self.arrive(own, epoch, num_tokens)
            if cutlass.const_expr(not self.scattered):
                self.gather(own, out, rank, slot, num_tokens, epoch, left)

    @cute.jit
    def own_part(self, address: Int64, rows: Int32, width: cutlass.Constexpr) -> Int64:
        """This rank's rows of all ranks', in a loopback launch; else all there are.

        Worked out where it is wanted: registers are short.
        """
        rank_here = Int32(ptx.kept(Uint32(cute.arch.block_idx()[1])))
        return address + Int64(rank_here * rows) * (width * 2)

    @cute.jit
    def sync(self):
        """A barrier of the threads that do not only start copies."""
        if cutlass.const_expr(self.streams):
            cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)
        else:
            cute.arch.sync_threads()

    @cute.jit
    def make_barriers(self, smem: Uint32):
        """Initialises the block's barriers, which other blocks use too."""
        if cute.arch.thread_idx()[0] == 0:
            for barrier in cutlass.range_constexpr(self.num_barriers):
                ptx.barrier_init(self.barrier(smem, barrier), 1)
            words.fence_barrier_init()
        cute.arch.sync_threads()

    @cute.jit
    def load_gain(self, gain: Int64):
        """The gain of the 8 columns that this lane norms, in every row alike."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        chunk = thread // 32 % self.row_warps * 32 + thread % 32
        last = Int32(self.chunks - 1) - chunk
        column = (block % self.k_blocks) * self.k_width + chunk * 8
        return words.load_if(last, gain + Int64(column) * 2)

    # ---- reduce -------------------------------------------------------------------------------

    @cute.jit
    def reduce(self, own, latent, factors, kept, rank, slot, num_tokens, epoch, left, eps, smem):
        """m and n of the rows that this cluster sums; returns what is left of the budget."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = thread // 32, thread % 32
        squares = self.barrier(smem, SQUARES)
        first, stride = Int32(0), 1
        if cutlass.const_expr(self.two_shot):
            first, stride = rank + self.ranks * (block // self.k_blocks), self.ranks * self.groups
        count = cutlass.max(num_tokens - first + (stride - 1), 0) // stride
        if thread == 0:
            ptx.barrier_expect(squares, count * (self.k_blocks * self.row_warps * 4))
        column = (block % self.k_blocks) * self.k_width

        part = warp % self.row_warps
        chunk = part * 32 + lane
        total = count * self.row_warps
        # A lane past the slice's end repeats its last piece.
        place = (column + cutlass.min(chunk, self.chunks - 1) * 8) * 2
        mailbox = own + self.layout.latent + place
        mailbox = mailbox + Int64(slot) * (self.ranks * self.max_tokens * self.latent_size * 2)
        sources = (mailbox, latent + place)

        for unit in cutlass.range(warp, total, self.warps):
            index = unit // self.row_warps
            summed, left = self.sum_ranks(own, epoch, left, rank, sources, first + index * stride)
            square = Float32(0.0)
            if chunk < self.chunks:
                for word in cutlass.range_constexpr(4):
                    low, high = ptx.low_float(summed[word]), ptx.high_float(summed[word])
                    square = ptx.fused(high, high, ptx.fused(low, low, square))
                words.store_shared_words(self.staged(smem, index) + Uint32(chunk * 16), summed)
            square = words.warp_sum(square)
            if lane < self.k_blocks:
                at = (index * self.k_blocks + block % self.k_blocks) * self.row_warps + part
                at = smem + Uint32(self.parts[0] + at * 4)
                words.store_async(at, lane, [square], squares)
        if (warp < self.multipliers) & self.reads_early:  # while the squares are on their way
            self.wait_for_weights(warp // self.k_parts, smem)
            self.read_weights(kept, smem)
        ptx.barrier_wait(squares, Uint32(0))

        for unit in cutlass.range(warp, total, self.warps):
            index = unit // self.row_warps
            if chunk < self.chunks:
                scale = self.scale_of(index, eps, smem)
                at = self.staged(smem, index) + Uint32(chunk * 16)
                normed = scaled(ptx.load_shared_4(at), factors, scale)
                if cutlass.const_expr(self.two_shot):
                    finished = slot * self.max_tokens + first + index * stride
                    to = self.layout.normed + (Int64(finished) * self.latent_size + column) * 2
                    to = to + chunk * 16
                    normed = [words.canonical(word) for word in normed]
                    self.send_to_all(smem, Int32(-1), to, normed)
                else:
                    words.store_shared_words(at, normed)
        if cutlass.const_expr(self.two_shot):
            self.sync()  # finished rows take the place of these
        return left

    @cute.jit
    def staged(self, smem: Uint32, index: Int32) -> Uint32:
        """A row's place in shared memory."""
        return smem + Uint32(self.parts[1]) + Uint32(index * self.row_bytes)

    @cute.jit
    def sum_ranks(self, own, epoch, left, rank, sources, row):
        """r(sum over ranks, in order) of 8 columns of a row, and what is left of the budget.

        `sources` are the addresses of row 0 of rank 0's partials in the mailbox, and of the own
        partials.
        """
        mailbox, latent = sources
        kept, row = self.kept_from(rank), Int64(row) * (self.latent_size * 2)
        batch = min(self.ranks, POLLED_LOADS)
        sums = [Float32(0.0)] * 8
        got = cute.make_rmem_tensor((4 * batch,), Uint32)
        for base in cutlass.range_constexpr(0, self.ranks, batch):
            loads = []
            for sender in cutlass.range_constexpr(base, base + batch):
                at = mailbox + sender * (self.max_tokens * self.latent_size * 2)
                loads.append((cutlass.select_(kept == sender, latent, at) + row, 0, sender))
            self.look(loads, got)
            left = self.poll(own, epoch, left, kept, loads, got)
            for sender in cutlass.range_constexpr(batch):
                for j in cutlass.range_constexpr(4):
                    pair = got[4 * sender + j]
                    sums[2 * j] = sums[2 * j] + ptx.low_float(pair)
                    sums[2 * j + 1] = sums[2 * j + 1] + ptx.high_float(pair)
        return [ptx.round_pair(sums[2 * j], sums[2 * j + 1]) for j in range(4)], left

    @cute.jit
    def scale_of(self, index: Int32, eps: Float32, smem: Uint32) -> Float32:
        """rsqrt(mean of squares + eps) of a row, from the cluster's partial sums in order."""
        total = Float32(0.0)
        count = self.k_blocks * self.row_warps
        at = smem + Uint32(self.parts[0]) + Uint32(index * (count * 4))
        for i in cutlass.range_constexpr(0, count, 2):
            low, high = ptx.load_shared_floats(at + Uint32(i * 4))
            total = (total + low) + high
        return words.reciprocal_root(total * Float32(1 / self.latent_size) + eps)

    # ---- project ------------------------------------------------------------------------------

    @cute.jit
    def project(self, own, shared, out, held, kept, rank, slot, num_tokens, epoch, left, smem):
        """Rounds of tokens through the matrix instructions; returns what is left of the budget."""
        arrays = (shared, out, held, kept)
        if cutlass.const_expr(self.streams):
            zero = Int32(0)
            left = self.project_round(
                own, arrays, rank, slot, zero, num_tokens, zero, epoch, left, smem
            )
        else:
            if cutlass.const_expr(self.reads_all and not self.reads_early):
                warp = cute.arch.thread_idx()[0] // 32
                if warp < self.multipliers:
                    self.wait_for_weights(warp // self.k_parts, smem)
            round_tokens = self.round_tokens * self.k_blocks
            for first in cutlass.range(0, num_tokens, round_tokens):
                count, number = cutlass.min(num_tokens - first, round_tokens), first // round_tokens
                left = self.project_round(
                    own, arrays, rank, slot, first, count, number, epoch, left, smem
                )
        return left

    @cute.jit
    def project_round(self, own, arrays, rank, slot, first, count, number, epoch, left, smem):
        """Some tokens from `first` on; returns what is left of the budget."""
        shared, out, held, kept = arrays
        multiplies = cute.arch.thread_idx()[0] < 32 * self.multipliers
        tile = cute.arch.thread_idx()[0] // 32 // self.k_parts
        rows = first
        if cutlass.const_expr(self.two_shot):
            left = self.stage_normed(own, slot, first, count, epoch, left, smem)
            rows = Int32(0)
        self.sync()
        token, column, here = self.finished(count)
        loads = self.shared_loads(own, slot, first + token, column)
        partials = cute.make_rmem_tensor((self.ranks,), Uint32)
        added = Uint32(0)
        if here:
            self.look(loads, partials)
            if cutlass.const_expr(self.streams):  # before the weights are here
                left = self.poll(own, epoch, left, rank, loads, partials)
                mine = self.own_shared(shared, first + token, column, rank)
                added = self.sum_pairs(partials, mine, rank)
        if cutlass.const_expr(self.streams):
            if multiplies:
                self.multiply_streamed(rows, count, smem)
        elif multiplies:
            if cutlass.const_expr(not self.reads_all):
                self.wait_for_weights(tile, smem)
            elif cutlass.const_expr(not self.reads_early):
                self.read_weights(kept, smem)
            for group in cutlass.range(0, count, 8 * self.token_tiles):
                self.multiply(held, kept, rows, count, group, smem)
        if cutlass.const_expr(self.streams):
            token, column, here = self.finished(count)  # worked out again: registers are short
        mine = Uint32(0)
        if cutlass.const_expr(not self.streams):
            if here:
                mine = self.own_shared(shared, first + token, column, rank)
            self.sync()
            self.hand_over(count, number, smem)
        word = Uint32(0)
        if here:
            if cutlass.const_expr(not self.streams):
                left = self.poll(own, epoch, left, rank, loads, partials)
            routed = self.sum_blocks(token, column, number, smem)
            if cutlass.const_expr(not self.streams):
                added = self.sum_pairs(partials, mine, rank)
            word = add_pairs(routed, added)
        self.publish_output(out, word, rank, slot, first + token, column, here, smem)
        return left

    @cute.jit
    def own_shared(self, shared: Int64, token: Int32, column: Int32, rank: Int32) -> Uint32:
        """Two columns of this rank's own shared partial."""
        place = Int64(token) * self.hidden_size + rank * self.layout.columns + column
        return words.load_word(shared + place * 2)

    @cute.jit
    def stage_normed(self, own, slot, first, count, epoch, left, smem):
        """The block's slice of a round's rows, out of the mailbox into shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        column = (block % self.k_blocks) * self.k_width
        mailbox = own + self.layout.normed + Int64(column) * 2
        row, total = slot * self.max_tokens + first, count * self.chunks
        got = cute.make_rmem_tensor((4 * STAGED_LOADS,), Uint32)
        for base in cutlass.range(thread, total, self.workers * STAGED_LOADS):
            loads = []
            for i in cutlass.range_constexpr(STAGED_LOADS):
                unit = cutlass.min(base + i * self.workers, total - 1)  # past the end, the last
                place = Int64(row + unit // self.chunks) * (self.latent_size * 2)
                owner = (first + unit // self.chunks) % self.ranks
                loads.append((mailbox + place + unit % self.chunks * 16, 0, owner))
            self.look(loads, got)
            left = self.poll(own, epoch, left, Int32(-1), loads, got)
            for i in cutlass.range_constexpr(STAGED_LOADS):
                unit = base + i * self.workers
                if unit < total:
                    at = self.staged(smem, unit // self.chunks) + Uint32(unit % self.chunks * 16)
                    words.store_shared_words(at, [got[4 * i + j] for j in range(4)])
        return left

    @cute.jit
    def multiply(self, held, kept, rows, count, first, smem):
        """16 weight rows times 8 or 16 tokens, over the warp's part of K.

        Tokens past the last repeat it; their sums are dropped.
        """
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        part, tile = warp % self.k_parts, warp // self.k_parts
        offset = Uint32(part * (self.steps * STEP * 2) + lane % 4 * 16)
        tiles = self.token_tiles
        tokens = [cutlass.min(first + 8 * n + lane // 4, count - 1) for n in range(tiles)]
        places = [self.staged(smem, rows + token) + offset for token in tokens]
        zero = Float32(0.0)
        width = 2 // tiles  # two chains of dependent products either way
        chains = [[(zero, zero, zero, zero) for _ in range(width)] for _ in range(tiles)]
        for step in cutlass.range_constexpr(self.steps):
            above, below = self.step_weights(held, kept, step, smem)
            for n in cutlass.range_constexpr(tiles):
                x = ptx.load_shared_4(places[n] + Uint32(step * STEP * 2))
                multiply_step(above, below, x, chains[n])
        place = part * self.rows + tile * TILE_ROWS + lane // 4
        for n in cutlass.range_constexpr(tiles):
            total = add_chains(chains[n])
            for i in cutlass.range_constexpr(2):
                token = first + 8 * n + lane % 4 * 2 + i
                if token < count:
                    at = smem + Uint32(self.partials + (token * self.partial_stride + place) * 4)
                    ptx.store_shared_float(at, total[i])
                    ptx.store_shared_float(at + Uint32(32), total[2 + i])

    @cute.jit
    def multiply_streamed(self, rows, count, smem):
        """The warp's one or two streamed tiles times a round's tokens.

        Two tiles share their loads of tokens: shared memory has the copies to take in as well.
        """
        warp = cute.arch.thread_idx()[0] // 32
        if cutlass.const_expr(self.pairs):
            if warp < self.pairs:
                self.multiply_tiles(2 * warp, 2, rows, count, smem)
            else:
                self.multiply_tiles(warp + self.pairs, 1, rows, count, smem)
        else:
            self.multiply_tiles(warp, 1, rows, count, smem)

    @cute.jit
    def multiply_tiles(self, first: Int32, number: cutlass.Constexpr, rows, count, smem):
        """Adjacent tiles of 16 rows times 8 tokens; those past the last repeat it and are dropped.

        Sums go from registers to the blocks that finish them.
        """
        lane = cute.arch.thread_idx()[0] % 32
        for i in cutlass.range_constexpr(number):
            self.wait_for_weights(first + i, smem)
        offset = Uint32(lane % 4 * 16)
        place = self.staged(smem, rows + cutlass.min(lane // 4, count - 1)) + offset
        starts = [self.weight_row(first + i, lane // 4, smem) + offset for i in range(number)]
        zero = Float32(0.0)
        width = 2 // number  # two chains of dependent products either way
        chains = [[(zero, zero, zero, zero) for _ in range(width)] for _ in range(number)]
        for step in cutlass.range_constexpr(self.steps):
            x = ptx.load_shared_4(place + Uint32(step * STEP * 2))
            for n in cutlass.range_constexpr(number):
                above = ptx.load_shared_4(starts[n] + Uint32(step * STEP * 2))
                below = ptx.load_shared_4(starts[n] + Uint32(step * STEP * 2 + self.eight_rows))
                multiply_step(above, below, x, chains[n])
        for n in cutlass.range_constexpr(number):
            total = add_chains(chains[n])
            for i in cutlass.range_constexpr(2):
                token = lane % 4 * 2 + i
                if token < count:
                    row = (first + n) * TILE_ROWS + lane // 4
                    self.send_sums(token, row, total[i], total[2 + i], smem)
            self.leave_tile(first + n, count, smem)

    @cute.jit
    def buffer(self, number: Int32, smem: Uint32):
        """The buffer of sums of a round, its barrier, and the parity of the barrier's phase."""
        which = number % 2
        at = smem + Uint32(self.sums) + Uint32(which * self.buffer_bytes)
        return at, self.barrier(smem, SUMS + which), Uint32(number // 2 % 2)

    @cute.jit
    def tile_sums(self, tile: Int32, smem: Uint32):
        """The same of a tile's sums, if weights are streamed: there is one round."""
        barrier = self.barrier(smem, SUMS + tile // FINISH_TILES)
        return smem + Uint32(self.sums), barrier, Uint32(0)

    @cute.jit
    def hand_over(self, count: Int32, number: Int32, smem: Uint32):
        """Adds up the warps' sums of a round and stores them to the blocks that finish its tokens.

        The buffer is free: this block has all sums of the round before, so every block had begun
        to multiply in that one, and was done with the one before.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        sums, barrier, _ = self.buffer(number, smem)
        block, quads = block % self.k_blocks, self.rows // 4
        if thread == 0:
            tokens = (count - block + (self.k_blocks - 1)) // self.k_blocks
            ptx.barrier_expect(barrier, tokens * self.buffer_bytes // self.round_tokens)
        for unit in cutlass.range(thread, count * quads, self.workers):
            token, row = unit // quads, unit % quads * 4
            at = smem + Uint32(self.partials + (token * self.partial_stride + row) * 4)
            total = words.load_four_floats(at)
            for part in cutlass.range_constexpr(1, self.k_parts):
                more = words.load_four_floats(at + Uint32(part * self.rows * 4))
                total = [a + b for a, b in zip(total, more, strict=True)]
            place = (token // self.k_blocks * self.k_blocks + block) * self.rows + row
            words.store_async(sums + Uint32(place * 4), token % self.k_blocks, total, barrier)

    @cute.jit
    def send_sums(self, token: Int32, row: Int32, above: Float32, below: Float32, smem: Uint32):
        """The same by a lane of a warp that streamed a tile: a token's sums of two of its rows.

        What a warp finishes has a barrier of its own, so all but the last columns are on their way
        to the other ranks before the last tile has landed.
        """
        block, _, _ = cute.arch.block_idx()
        place = token // self.k_blocks * self.k_blocks + block % self.k_blocks
        sums, barrier, _ = self.tile_sums(row // TILE_ROWS, smem)
        at = sums + Uint32((place * self.rows + row) * 4)
        words.store_async(at, token % self.k_blocks, [above], barrier)
        words.store_async(at + Uint32(32), token % self.k_blocks, [below], barrier)

    @cute.jit
    def leave_tile(self, tile: Int32, count: Int32, smem: Uint32):
        """After a streamed tile's product: what this block expects of all, and the tile's place."""
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.thread_idx()[0] % 32
        if (lane == 0) & (tile % FINISH_TILES == 0):
            _, barrier, _ = self.tile_sums(tile, smem)
            tokens = (count - block % self.k_blocks + (self.k_blocks - 1)) // self.k_blocks
            rows = cutlass.min(self.tiles - tile, FINISH_TILES) * TILE_ROWS
            ptx.barrier_expect(barrier, tokens * rows * (self.k_blocks * 4))
        if tile < self.tiles - self.slots:
            cute.arch.sync_warp()  # all lanes have read their weights
            if lane == 0:
                ptx.barrier_arrive(self.freed(tile, smem))

    @cute.jit
    def finished(self, count: Int32):
        """Which token of a round and which columns of the rank this thread finishes, two columns.

        The last threads do it: their warps did not multiply, if any did not. The third is whether
        there is such a token.
        """
        thread = Int32(self.workers - 1) - cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.streams):
            thread = Int32(ptx.kept(Uint32(thread)))
        block, _, _ = cute.arch.block_idx()
        pairs = self.rows // 2
        index = thread // pairs
        token = index * self.k_blocks + block % self.k_blocks
        column = block // self.k_blocks * self.rows + (pairs - 1 - thread % pairs) * 2
        return token, column, (index < self.round_tokens) & (token < count)

    @cute.jit
    def sum_blocks(self, token: Int32, column: Int32, number: Int32, smem: Uint32) -> Uint32:
        """r(sum over the cluster's blocks, in order) of two columns of a round's token."""
        sums, barrier, parity = (
            self.tile_sums(column % self.rows // TILE_ROWS, smem)
            if self.streams
            else self.buffer(number, smem)
        )
        ptx.barrier_wait(barrier, parity)
        low, high = Float32(0.0), Float32(0.0)
        place = token // self.k_blocks * (self.k_blocks * self.rows) + column % self.rows
        at = sums + Uint32(place * 4)
        for i in cutlass.range_constexpr(self.k_blocks):
            first, second = ptx.load_shared_floats(at + Uint32(i * self.rows * 4))
            low, high = low + first, high + second
        return ptx.round_pair(low, high)

    @cute.jit
    def publish_output(self, out, word, rank, slot, token, column, here, smem):
        """Writes two columns of a token, and sends them on: 16 bytes at once by four lanes."""
        lane = cute.arch.thread_idx()[0] % 32
        place = Int64(token) * self.result_width + column
        if cutlass.const_expr(not self.scattered):
            place = place + rank * self.layout.columns
        if here:
            ptx.store_global(out + place * 2, word)
        if cutlass.const_expr(not self.scattered):
            place = Int64(slot * self.max_tokens) * self.hidden_size + place
            at = self.layout.output + (place - lane % 4 * 2) * 2
            quad = [cute.arch.shuffle_sync(word, lane // 4 * 4 + i) for i in range(4)]
            if here & (lane % 4 == 0):
                self.send_to_all(smem, rank, at, quad)


def multiply_step(above, below, tokens, chains):
    """The two products of a step, each added to one of one or two chains of dependent products."""
    for half in range(2):
        i, j = 2 * half, 2 * half + 1
        weights = above[i], below[i], above[j], below[j]
        chain = half % len(chains)
        chains[chain] = ptx.multiply_add(weights, (tokens[i], tokens[j]), chains[chain])


def add_chains(chains):
    """A lane's four sums."""
    return [a + b for a, b in zip(*chains, strict=True)] if len(chains) == 2 else chains[0]


def _k3(ranks: int, num_tokens: int, experts: int = 0, **options) -> TailKernel:
    return TailKernel(**kernel_facts(ranks, 3584, 7168, num_tokens, experts), **options)


REPRESENTATIVES = {
    "TP=2, 8 tokens": _k3(2, 8),
    "TP=4, 8 tokens": _k3(4, 8),
    "TP=8, 8 tokens": _k3(8, 8),
    "TP=8, 8 tokens, unfinalised": _k3(8, 8, experts=16),
    "TP=2, 8 tokens, unfinalised": _k3(2, 8, experts=16),
    "TP=8, 64 tokens": _k3(8, 64),
    "TP=2, 32 tokens": _k3(2, 32),
    "TP=16, 64 tokens, scattered": _k3(16, 64, scattered=True),
}
