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
  norm's gain. What shared memory cannot hold of the weights (a fifth at TP=2) goes into registers,
  once the partials are on their way.
- All blocks publish to the other ranks: partial latents (or the weighted sum of the unfinalised
  rows) and slices of the shared partial, spread over the grid by warps. Then the upper half of the
  warps re-arms the previous slot, while the lower one polls. What a rank needs of its own partials
  it reads where they are; only weighed rows and finished ones take the way through its own mailbox.
- Reduce: a lane polls 8 columns of one row in the mailboxes of all ranks at once, adds in rank
  order and leaves m in shared memory. Sums of squares go to all blocks of the cluster (distributed
  shared memory), which add them in one order. In one shot every cluster does every row, its
  block b only slice b, so n is where the product wants it. In two shots cluster g does rows
  g, g + groups, .. of those that the rank owns and stores n to all ranks; then every block
  polls its slice of all rows.
- Project: m16n8k16 with 16 weight rows as A and 8 tokens as B. A lane's 16 bytes are 8 adjacent k
  of a row, where the instruction wants 2 + 2 at distance 8; as weights and latents are permuted
  alike, the sum over k is the same and nothing is shuffled. The warps' sums are added up and go to
  the block of the cluster that finishes the token, which adds them in order, rounds, adds the
  shared partials (looked at before the product, polled after it), writes its columns of the result
  and publishes them to the other ranks. Tokens are taken in rounds, on two buffers.
- Gather: every lane polls its pieces of the other ranks' columns and writes the result. Before that
  one thread counts the block; the last block moves the header on. Nobody waits for this atomic.

Blocks of a cluster hand each other float32 by `st.async`, counted on the receiver's barrier. A
cluster barrier would do, but one that releases the stores waits until everything that a thread has
stored, to other ranks too, has arrived: it costs more than the product.

Why it cannot hang. Blocks wait for words that blocks of the same phase or an earlier one store, on
this rank or another; phases are in one order in every block, and publishing waits for nothing. All
blocks are resident, so all of them get there. How many bytes blocks of a cluster expect of one
another depends on T alone, and nobody leaves before it has its own. A rank that does not come ends
every poll by its budget (`give_up`); what a failure means for later calls is in docs/protocol.md.

In a loopback launch the grid's second axis is the rank and `workspace_stride` the distance between
the ranks' workspaces and there is no peer; everything else is the same code.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.geometry import STEP, TILE_ROWS, kernel_facts
from k3jax.ops.tail.kernel_mailboxes import Mailboxes
from k3jax.runtime.program import Kernel
from k3jax.runtime.workspace import (
    ARRIVALS_WORD,
    EPOCH_WORD,
    PREVIOUS_WORD,
    RANK_WORD,
    SLOTS,
)

HEADER, SQUARES, SUMS, WEIGHTS = 0, 1, 2, 4
"""Shared-memory barriers of a block; there are two buffers of sums, and tiles of weights."""

POLLED_LOADS = 8
"""Most loads of 16 bytes that a lane has in flight while it polls partial latents."""
STAGED_LOADS = 4
"""The same for finished rows."""
WEIGHED_LOADS = 8
"""The same for rows of experts."""


@dataclass(frozen=True)
class TailKernel(Mailboxes, Kernel):
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
        row = Int64(num_tokens) * 2
        latent = latent + rank_here * row * (self.latent_size * max(self.experts_per_token, 1))
        shared = shared + rank_here * row * self.hidden_size
        out = out + rank_here * row * self.result_width
        sources = (latent, weights, ids, shared)

        self.make_barriers(smem)
        words.cluster_arrive()
        self.fetch_weights(up_proj, own, up_proj_stride, smem)
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
            self.fill_with_nan(out, num_tokens)
            for tile in cutlass.range(self.tiles):
                self.wait_for_weights(tile, smem)
            words.cluster_wait()
        else:
            slot = Int32(epoch % Uint32(SLOTS))
            self.publish(sources, piece, rank, slot, num_tokens, smem)
            if (epoch != Uint32(0)) & (thread >= self.threads // 2):
                self.rearm(own, rank, (slot + SLOTS - 1) % SLOTS, Int32(previous))
            held = []
            if cutlass.const_expr(self.holds_early):
                held = self.load_weights(up_proj, rank * up_proj_stride)
            words.cluster_wait()
            left = self.reduce(
                own, latent, factors, rank, slot, num_tokens, epoch, budget, eps, smem
            )
            if cutlass.const_expr(not self.holds_early):
                held = self.load_weights(up_proj, rank * up_proj_stride)
            left = self.project(own, shared, out, held, rank, slot, num_tokens, epoch, left, smem)
            self.arrive(own, epoch, num_tokens)
            if cutlass.const_expr(not self.scattered):
                self.gather(own, out, rank, slot, num_tokens, epoch, left)

    # ---- weights ------------------------------------------------------------------------------

    @cute.jit
    def make_barriers(self, smem: Uint32):
        """Initialises the block's barriers, which other blocks use too."""
        if cute.arch.thread_idx()[0] == 0:
            for barrier in cutlass.range_constexpr(self.num_barriers):
                ptx.barrier_init(self.barrier(smem, barrier), 1)
            words.fence_barrier_init()
        cute.arch.sync_threads()

    @cute.jit
    def barrier(self, smem: Uint32, index) -> Uint32:
        """Address of a barrier."""
        return smem + Uint32(self.barriers) + Uint32(index * 8)

    @cute.jit
    def fetch_weights(self, up_proj: Int64, own: Int64, stride: Int32, smem: Uint32):
        """The last warps start the copies of the block's rows into shared memory."""
        lane = cute.arch.thread_idx()[0] - (self.threads - self.fetching_threads)
        if lane >= 0:
            width = self.kept_steps * STEP * 2
            for tile in cutlass.range(lane, self.tiles, self.fetching_threads):
                ptx.barrier_expect(self.barrier(smem, WEIGHTS + tile), Int32(TILE_ROWS * width))
            rank = Int32(0)
            if stride != 0:  # else no copy need wait for the header
                rank = Int32(words.load_peer_word(own, RANK_WORD * 4))
            policy = ptx.evict_first_policy()
            source = self.slice_of_row(up_proj, rank * stride)
            # Warps take turns, so that tiles land in order.
            turn = lane % 32 * self.fetching_warps + lane // 32
            for row in cutlass.range(turn, self.rows, self.fetching_threads):
                target = smem + Uint32(self.parts[2]) + Uint32(row * self.weight_bytes)
                at = source + Int64(row) * (self.latent_size * 2)
                barrier = self.barrier(smem, WEIGHTS + row // TILE_ROWS)
                ptx.bulk_copy(target, at, Int32(width), barrier, policy)

    @cute.jit
    def slice_of_row(self, up_proj: Int64, first_row: Int32) -> Int64:
        """Address of the block's slice of its cluster's first row."""
        block, _, _ = cute.arch.block_idx()
        row = first_row + (block // self.k_blocks) * self.rows
        return up_proj + (Int64(row) * self.latent_size + block % self.k_blocks * self.k_width) * 2

    @cute.jit
    def wait_for_weights(self, tile: Int32, smem: Uint32):
        """Returns once the copies of a tile's rows have landed."""
        ptx.barrier_wait(self.barrier(smem, WEIGHTS + tile), Uint32(0))

    @cute.jit
    def load_weights(self, up_proj: Int64, first_row: Int32):
        """Issues a lane's loads of the steps that shared memory does not hold."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * TILE_ROWS + thread % 32 // 4
        address = self.slice_of_row(up_proj, first_row) + Int64(row) * (self.latent_size * 2)
        held = []
        for step in cutlass.range_constexpr(self.kept_steps, self.steps):
            at = address + step * STEP * 2 + thread % 4 * 16
            held.append((words.load_weights(at), words.load_weights(at + 16 * self.latent_size)))
        return held

    @cute.jit
    def read_weights(self, kept: cute.Tensor, smem: Uint32):
        """A lane's weights of all steps, out of shared memory."""
        for step in cutlass.range_constexpr(self.steps):
            above, below = self.kept_weights(step, smem)
            for i in cutlass.range_constexpr(4):
                kept[8 * step + i], kept[8 * step + 4 + i] = above[i], below[i]

    @cute.jit
    def kept_weights(self, step: cutlass.Constexpr, smem: Uint32):
        """A lane's 16 bytes of rows g and g + 8 for one step, out of shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        row = warp // self.k_parts * TILE_ROWS + lane // 4
        step = warp % self.k_parts * self.steps + step
        at = smem + Uint32(self.parts[2] + row * self.weight_bytes + step * (STEP * 2))
        at = at + Uint32(lane % 4 * 16)
        return ptx.load_shared_4(at), ptx.load_shared_4(at + Uint32(8 * self.weight_bytes))

    @cute.jit
    def step_weights(self, held: cutlass.Constexpr, kept, step: cutlass.Constexpr, smem: Uint32):
        """The same from where they are: `held` are the last steps, `kept` all if `reads_all`."""
        if cutlass.const_expr(self.reads_all):
            return [kept[8 * step + i] for i in range(4)], [
                kept[8 * step + 4 + i] for i in range(4)
            ]
        if cutlass.const_expr(step >= self.kept_steps):
            return held[step - self.kept_steps]
        return self.kept_weights(step, smem)

    @cute.jit
    def load_gain(self, gain: Int64):
        """The gain of the 8 columns that this lane norms, in every row alike."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        chunk = thread // 32 % self.row_warps * 32 + thread % 32
        last = Int32(self.chunks - 1) - chunk
        column = (block % self.k_blocks) * self.k_width + chunk * 8
        return words.load_if(last, gain + Int64(column) * 2)

    # ---- header -------------------------------------------------------------------------------

    @cute.jit
    def load_header(self, own: Int64, header: cute.Tensor):
        """The first warp's loads of the header, two words a lane."""
        lane, _, _ = cute.arch.thread_idx()
        if lane < 32:
            for i in cutlass.range_constexpr(2):
                header[i] = words.load_peer_word(own + lane * 4, i * 128)

    @cute.jit
    def share_header(self, header: cute.Tensor, smem: Uint32):
        """Returns once the first warp has stored the header into shared memory.

        Not by a barrier of the block: that would wait for the warps that start copies.
        """
        lane, _, _ = cute.arch.thread_idx()
        if lane < 32:
            for i in cutlass.range_constexpr(2):
                ptx.store_shared(smem + Uint32(lane * 4 + i * 128), header[i])
            cute.arch.sync_warp()
            if lane == 0:
                ptx.barrier_arrive(self.barrier(smem, HEADER))
        ptx.barrier_wait(self.barrier(smem, HEADER), Uint32(0))

    @cute.jit
    def arrive(self, own: Int64, epoch: Uint32, num_tokens: Int32):
        """Counts this block as past the header; the last one moves the header on.

        It takes an atomic's time, in a warp that finishes no token, when nobody waits for it.
        """
        if cute.arch.thread_idx()[0] == self.threads // 2 - 32:
            before = words.atomic_add(own + ARRIVALS_WORD * 4, Uint32(1))
            if before == Uint32(self.grid[0] - 1):
                words.store_peer_word(own + ARRIVALS_WORD * 4, Uint32(0))
                words.store_peer_word(own + EPOCH_WORD * 4, epoch + Uint32(1))
                call = Uint32(2) * Uint32(num_tokens) + Uint32(int(self.two_shot))
                words.store_peer_word(own + PREVIOUS_WORD * 4, call)

    @cute.jit
    def fill_with_nan(self, out: Int64, num_tokens: Int32):
        """The result of a call after a failure."""
        nan = Uint32(words.NAN_PAIR)
        pieces = num_tokens * (self.result_width // 8)
        for piece in cutlass.range(self.spread_thread(), pieces, self.grid_threads):
            words.store_words(out + Int64(piece) * 16, (nan, nan, nan, nan))

    # ---- publish ------------------------------------------------------------------------------

    @cute.jit
    def load_piece(self, sources, index: Int32, num_tokens: Int32, piece: cute.Tensor):
        """16 bytes to publish: first all rows of the latent, then all of the shared partial."""
        latent, weights, ids, shared = sources
        pieces, of_shared = self.latent_size // 8, self.hidden_size // 8
        beyond = index - num_tokens * pieces
        last = num_tokens * of_shared - 1 - beyond
        address = latent + Int64(index) * 16
        if beyond >= 0:
            address = shared + Int64(beyond) * 16
        if cutlass.const_expr(self.experts_per_token):
            if beyond < 0:
                got = self.weigh(latent, weights, ids, index // pieces, index % pieces)
                for j in cutlass.range_constexpr(4):
                    piece[j] = got[j]
            else:
                self.load_into(piece, last, address)
        else:
            self.load_into(piece, last, address)

    @cute.jit
    def load_into(self, piece: cute.Tensor, condition: Int32, address: Int64):
        """16 bytes, where the condition is not negative."""
        got = words.load_if(condition, address)
        for j in cutlass.range_constexpr(4):
            piece[j] = got[j]

    @cute.jit
    def publish(self, sources, piece, rank, slot, num_tokens, smem):
        """Own partial latents to all ranks or to the owners of their rows; own shared partials,
        each slice of columns to its owner. `piece` holds the thread's first.
        """
        pieces, owned = self.latent_size // 8, self.layout.columns // 8
        of_shared = self.hidden_size // 8
        first = Int32(self.spread_thread())
        of_latent = num_tokens * pieces
        for index in cutlass.range(first, num_tokens * (pieces + of_shared), self.grid_threads):
            got = [words.canonical(piece[j]) for j in range(4)]
            self.load_piece(sources, index + self.grid_threads, num_tokens, piece)
            row = (slot * self.ranks + rank) * self.max_tokens
            if index < of_latent:
                token = index // pieces
                at = Int64(row + token) * pieces + index % pieces
                at = self.layout.latent + at * 16
                if cutlass.const_expr(self.two_shot):
                    self.send(smem, token % self.ranks, self.kept_from(rank), at, got)
                else:
                    self.send_to_all(smem, self.kept_from(rank), at, got)
            else:
                column = (index - of_latent) % of_shared
                row = row + (index - of_latent) // of_shared
                at = self.layout.shared + (Int64(row) * owned + column % owned) * 16
                self.send(smem, column // owned, rank, at, got)

    def kept_from(self, rank: Int32) -> Int32:
        """The rank whose partial latent is read where it is: none if rows are weighed first."""
        return Int32(-1) if self.experts_per_token else rank

    @cute.jit
    def weigh(self, rows: Int64, weights: Int64, ids: Int64, token: Int32, piece: Int32):
        """8 columns of the weighted sum of a token's expert rows; id -1 counts as nothing."""
        sums = cute.make_rmem_tensor((8,), Float32)
        sums.fill(0.0)
        pair = Int64(token) * self.experts_per_token
        address = rows + (pair * self.latent_size + piece * 8) * 2
        for k in cutlass.range(self.experts_per_token, unroll=WEIGHED_LOADS):
            expert = ptx.load_global(ids + (pair + k) * 4)
            weight = ptx.load_global_float(weights + (pair + k) * 4)
            weight = cutlass.select_(expert >= 0, weight, Float32(0.0))
            loaded = ptx.load_global_4(address + Int64(k) * (self.latent_size * 2))
            for j in cutlass.range_constexpr(4):
                # No load waits for the id: a dropped row is read too, and may hold anything.
                word = cutlass.select_(expert >= 0, loaded[j], Uint32(0))
                sums[2 * j] = ptx.fused(ptx.low_float(word), weight, sums[2 * j])
                sums[2 * j + 1] = ptx.fused(ptx.high_float(word), weight, sums[2 * j + 1])
        return [ptx.round_pair(sums[2 * j], sums[2 * j + 1]) for j in range(4)]

    # ---- reduce -------------------------------------------------------------------------------

    @cute.jit
    def reduce(self, own, latent, factors, rank, slot, num_tokens, epoch, left, eps, smem):
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
        ptx.barrier_wait(squares, Uint32(0))

        for unit in cutlass.range(warp, total, self.warps):
            index = unit // self.row_warps
            if chunk < self.chunks:
                scale = self.scale_of(index, eps, smem)
                at = self.staged(smem, index) + Uint32(chunk * 16)
                normed = _scale(ptx.load_shared_4(at), factors, scale)
                if cutlass.const_expr(self.two_shot):
                    finished = slot * self.max_tokens + first + index * stride
                    to = self.layout.normed + (Int64(finished) * self.latent_size + column) * 2
                    to = to + chunk * 16
                    normed = [words.canonical(word) for word in normed]
                    self.send_to_all(smem, Int32(-1), to, normed)
                else:
                    words.store_shared_words(at, normed)
        if cutlass.const_expr(self.two_shot):
            cute.arch.sync_threads()  # finished rows take the place of these
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
    def project(self, own, shared, out, held, rank, slot, num_tokens, epoch, left, smem):
        """Rounds of tokens through the matrix instructions; returns what is left of the budget."""
        round_tokens = self.round_tokens * self.k_blocks
        multiplies = cute.arch.thread_idx()[0] < 32 * self.multipliers
        kept = cute.make_rmem_tensor((8 * self.steps,), Uint32)
        tile = cute.arch.thread_idx()[0] // 32 // self.k_parts
        if multiplies & self.reads_all:
            self.wait_for_weights(tile, smem)
            if cutlass.const_expr(self.holds_early):  # while other warps are about to norm
                self.read_weights(kept, smem)
        for first in cutlass.range(0, num_tokens, round_tokens):
            count = cutlass.min(num_tokens - first, round_tokens)
            number = first // round_tokens
            rows = first
            if cutlass.const_expr(self.two_shot):
                left = self.stage_normed(own, slot, first, count, epoch, left, smem)
                rows = Int32(0)
            cute.arch.sync_threads()
            token, column, here = self.finished(count)
            loads = self.shared_loads(own, slot, first + token, column)
            partials = cute.make_rmem_tensor((self.ranks,), Uint32)
            if here:
                self.look(loads, partials)
            if multiplies:
                if cutlass.const_expr(not self.reads_all):
                    self.wait_for_weights(tile, smem)
                elif cutlass.const_expr(not self.holds_early):
                    self.read_weights(kept, smem)
                for group in cutlass.range(0, count, 8 * self.token_tiles):
                    self.multiply(held, kept, rows, count, group, smem)
            mine = Uint32(0)
            if here:
                at = Int64(first + token) * self.hidden_size + rank * self.layout.columns + column
                mine = words.load_word(shared + at * 2)
            cute.arch.sync_threads()
            self.hand_over(count, number, smem)
            word = Uint32(0)
            if here:
                left = self.poll(own, epoch, left, rank, loads, partials)
                routed = self.sum_blocks(token, column, number, smem)
                word = _add_pairs(routed, self.sum_pairs(partials, mine, rank))
            self.publish_output(out, word, rank, slot, first + token, column, here, smem)
        return left

    @cute.jit
    def stage_normed(self, own, slot, first, count, epoch, left, smem):
        """The block's slice of a round's rows, out of the mailbox into shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        column = (block % self.k_blocks) * self.k_width
        mailbox = own + self.layout.normed + Int64(column) * 2
        row, total = slot * self.max_tokens + first, count * self.chunks
        got = cute.make_rmem_tensor((4 * STAGED_LOADS,), Uint32)
        for base in cutlass.range(thread, total, self.threads * STAGED_LOADS):
            loads = []
            for i in cutlass.range_constexpr(STAGED_LOADS):
                unit = cutlass.min(base + i * self.threads, total - 1)  # past the end, the last
                place = Int64(row + unit // self.chunks) * (self.latent_size * 2)
                owner = (first + unit // self.chunks) % self.ranks
                loads.append((mailbox + place + unit % self.chunks * 16, 0, owner))
            self.look(loads, got)
            left = self.poll(own, epoch, left, Int32(-1), loads, got)
            for i in cutlass.range_constexpr(STAGED_LOADS):
                unit = base + i * self.threads
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
                for half in cutlass.range_constexpr(2):
                    i, j = 2 * half, 2 * half + 1
                    a = (above[i], below[i], above[j], below[j])
                    chain = half % width
                    chains[n][chain] = ptx.multiply_add(a, (x[i], x[j]), chains[n][chain])
        place = part * self.rows + tile * TILE_ROWS + lane // 4
        for n in cutlass.range_constexpr(tiles):
            total = chains[n][0]
            if cutlass.const_expr(width == 2):
                total = [a + b for a, b in zip(*chains[n], strict=True)]
            for i in cutlass.range_constexpr(2):
                token = first + 8 * n + lane % 4 * 2 + i
                if token < count:
                    at = smem + Uint32(self.partials + (token * self.partial_stride + place) * 4)
                    ptx.store_shared_float(at, total[i])
                    ptx.store_shared_float(at + Uint32(32), total[2 + i])

    @cute.jit
    def buffer(self, number: Int32, smem: Uint32):
        """The buffer of sums of a round, its barrier, and the parity of the barrier's phase."""
        which = number % 2
        at = smem + Uint32(self.sums) + Uint32(which * self.buffer_bytes)
        return at, self.barrier(smem, SUMS + which), Uint32(number // 2 % 2)

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
        for unit in cutlass.range(thread, count * quads, self.threads):
            token, row = unit // quads, unit % quads * 4
            at = smem + Uint32(self.partials + (token * self.partial_stride + row) * 4)
            total = words.load_four_floats(at)
            for part in cutlass.range_constexpr(1, self.k_parts):
                more = words.load_four_floats(at + Uint32(part * self.rows * 4))
                total = [a + b for a, b in zip(total, more, strict=True)]
            place = (token // self.k_blocks * self.k_blocks + block) * self.rows + row
            words.store_async(sums + Uint32(place * 4), token % self.k_blocks, total, barrier)

    @cute.jit
    def finished(self, count: Int32):
        """Which token of a round and which columns of the rank this thread finishes, two columns.

        The last threads do it: their warps did not multiply, if any did not. The third is whether
        there is such a token.
        """
        thread = Int32(self.threads - 1) - cute.arch.thread_idx()[0]
        block, _, _ = cute.arch.block_idx()
        pairs = self.rows // 2
        index = thread // pairs
        token = index * self.k_blocks + block % self.k_blocks
        column = block // self.k_blocks * self.rows + (pairs - 1 - thread % pairs) * 2
        return token, column, (index < self.round_tokens) & (token < count)

    @cute.jit
    def shared_loads(self, own, slot, token, column):
        """What to look at for the shared partials of two columns of a token."""
        row = Int64(slot * (self.ranks * self.max_tokens) + token)
        at = own + self.layout.shared + (row * self.layout.columns + column) * 2
        between = self.max_tokens * self.layout.columns * 2
        return [(at, sender * between, sender) for sender in range(self.ranks)]

    @cute.jit
    def sum_blocks(self, token: Int32, column: Int32, number: Int32, smem: Uint32) -> Uint32:
        """r(sum over the cluster's blocks, in order) of two columns of a round's token."""
        sums, barrier, parity = self.buffer(number, smem)
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

    @cute.jit
    def sum_pairs(self, pairs: cute.Tensor, mine: Uint32, rank: Int32) -> Uint32:
        """r(sum over ranks, in order) of two columns, `mine` being this rank's."""
        low, high = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(self.ranks):
            pair = cutlass.select_(rank == i, mine, pairs[i])
            low, high = low + ptx.low_float(pair), high + ptx.high_float(pair)
        return ptx.round_pair(low, high)

    # ---- gather -------------------------------------------------------------------------------

    @cute.jit
    def gather(self, own, out, rank, slot, num_tokens, epoch, left):
        """The other ranks' columns, out of the mailbox into the result."""
        pieces, owned = self.hidden_size // 8, self.layout.columns // 8
        first, total = Int32(self.spread_thread()), num_tokens * pieces
        mailbox = own + self.layout.output
        mailbox = mailbox + Int64(slot * self.max_tokens) * (self.hidden_size * 2)
        got = cute.make_rmem_tensor((4,), Uint32)
        for piece in cutlass.range(first, total, self.grid_threads):
            owner = piece % pieces // owned
            if owner != rank:
                loads = [(mailbox + Int64(piece) * 16, 0, owner)]
                self.look(loads, got)
                left = self.poll(own, epoch, left, rank, loads, got)
                words.store_words(out + Int64(piece) * 16, [got[j] for j in range(4)])


def _scale(pairs, factors, scale: Float32):
    """r(m * scale * gain) of 8 columns."""
    return [
        ptx.round_pair(
            ptx.low_float(pair) * scale * ptx.low_float(factor),
            ptx.high_float(pair) * scale * ptx.high_float(factor),
        )
        for pair, factor in zip(pairs, factors, strict=True)
    ]


def _add_pairs(a: Uint32, b: Uint32) -> Uint32:
    """r(a + b) of two columns, without -0."""
    low = ptx.low_float(a) + ptx.low_float(b)
    return words.canonical(ptx.round_pair(low, ptx.high_float(a) + ptx.high_float(b)))


def _k3(ranks: int, num_tokens: int, **options) -> TailKernel:
    return TailKernel(**kernel_facts(ranks, 3584, 7168, num_tokens), **options)


REPRESENTATIVES = {
    "TP=2, 8 tokens": _k3(2, 8),
    "TP=4, 8 tokens": _k3(4, 8),
    "TP=8, 8 tokens": _k3(8, 8),
    "TP=8, 8 tokens, unfinalised": _k3(8, 8, experts_per_token=16),
    "TP=8, 64 tokens": _k3(8, 64),
    "TP=2, 32 tokens": _k3(2, 32),
    "TP=16, 64 tokens, scattered": _k3(16, 64, scattered=True),
}
