"""How a block of the fused tail gets its rows of the up-projection, and where they are.

`kernel_tail` says when it happens.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.geometry import STEP, TILE_ROWS
from k3jax.ops.tail.kernel_exchange import SUMS, Exchange
from k3jax.runtime.workspace import RANK_WORD


class Weights(Exchange):
    """Device code of the copies into shared memory, and of the loads into registers."""

    @cute.jit
    def fetch_weights(self, up_proj: Int64, own: Int64, stride: Int32, smem: Uint32):
        """The last warps start the copies of the block's rows into shared memory.

        They take turns, so that tiles land in order.
        """
        lane = cute.arch.thread_idx()[0] - (self.threads - self.fetching_threads)
        if lane >= 0:
            width = self.kept_width
            for tile in cutlass.range(lane, self.tiles, self.fetching_threads):
                ptx.barrier_expect(self.landed(tile, smem), Int32(TILE_ROWS * width))
            rank = Int32(0)
            if stride != 0:  # else no copy need wait for the header
                rank = Int32(words.load_peer_word(own, RANK_WORD * 4))
            policy = ptx.evict_first_policy()
            source = self.slice_of_row(up_proj, rank * stride)
            turn = lane % 32 * self.fetching_warps + lane // 32
            if cutlass.const_expr(self.streams):
                self.stream_tiles(source, turn, policy, smem)
            else:
                for row in cutlass.range(turn, self.rows, self.fetching_threads):
                    self.fetch_row(source, row // TILE_ROWS, row % TILE_ROWS, policy, smem)

    @cute.jit
    def stream_tiles(self, source: Int64, turn: Int32, policy, smem: Uint32):
        """Copies of tile after tile, `window` of them on their way at a time."""
        for tile in cutlass.range(self.tiles):
            if tile >= self.window:
                self.wait_for_weights(tile - self.window, smem)
            if tile >= self.slots:
                ptx.barrier_wait(self.freed(tile - self.slots, smem), Uint32(0))
            if turn < TILE_ROWS:
                self.fetch_row(source, tile, turn, policy, smem)

    @cute.jit
    def fetch_row(self, source: Int64, tile: Int32, row: Int32, policy, smem: Uint32):
        """Starts the copy of a row of a tile."""
        at = source + Int64(tile * TILE_ROWS + row) * (self.latent_size * 2)
        barrier = self.landed(tile, smem)
        target = self.weight_row(tile, row, smem)
        ptx.bulk_copy(target, at, Int32(self.kept_width), barrier, policy)

    @cute.jit
    def weight_row(self, tile: Int32, row: Int32, smem: Uint32) -> Uint32:
        """A row of a tile in shared memory."""
        start = smem + Uint32(self.parts[2])
        if cutlass.const_expr(self.streams):
            slot = cutlass.select_(tile < self.slots, tile, tile - self.slots)
            place = slot * (TILE_ROWS // 2) + row // 2
            return start + Uint32(place * self.kept_width + row % 2 * self.odd_rows)
        return start + Uint32((tile * TILE_ROWS + row) * self.weight_bytes)

    @cute.jit
    def landed(self, tile: Int32, smem: Uint32) -> Uint32:
        """The barrier that says that a tile's weights are there."""
        return self.barrier(smem, SUMS + self.sum_barriers + tile)

    @cute.jit
    def freed(self, tile: Int32, smem: Uint32) -> Uint32:
        """The barrier that says that a tile's place may be taken."""
        return self.landed(self.tiles + tile, smem)

    @cute.jit
    def slice_of_row(self, up_proj: Int64, first_row: Int32) -> Int64:
        """Address of the block's slice of its cluster's first row."""
        block, _, _ = cute.arch.block_idx()
        row = first_row + (block // self.k_blocks) * self.rows
        return up_proj + (Int64(row) * self.latent_size + block % self.k_blocks * self.k_width) * 2

    @cute.jit
    def wait_for_weights(self, tile: Int32, smem: Uint32):
        """Returns once the copies of a tile's rows have landed."""
        ptx.barrier_wait(self.landed(tile, smem), Uint32(0))

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
        step = warp % self.k_parts * self.steps + step
        at = self.weight_row(warp // self.k_parts, lane // 4, smem)
        at = at + Uint32(step * (STEP * 2) + lane % 4 * 16)
        return ptx.load_shared_4(at), ptx.load_shared_4(at + Uint32(self.eight_rows))

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
