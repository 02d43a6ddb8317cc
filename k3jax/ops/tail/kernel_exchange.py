"""What a call of the fused tail does beside its product: header, publishing, gathering.

`kernel_tail` says when it happens.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.kernel_mailboxes import Mailboxes
from k3jax.runtime.workspace import ARRIVALS_WORD, EPOCH_WORD, PREVIOUS_WORD

WEIGHED_LOADS = 8
"""Most loads of 16 bytes of experts' rows that a lane has in flight."""

HEADER, SQUARES, SUMS = 0, 1, 2
"""Shared-memory barriers of a block: the header, sums of squares, sums are there; those of weights
follow."""


class Exchange(Mailboxes):
    """Device code of these phases."""

    # ---- header -------------------------------------------------------------------------------

    @cute.jit
    def barrier(self, smem: Uint32, index) -> Uint32:
        """Address of a barrier."""
        return smem + Uint32(self.barriers) + Uint32(index * 8)

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
        if cute.arch.thread_idx()[0] == self.workers // 2 - 32:
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

    # ---- the last sum, gather -----------------------------------------------------------------

    @cute.jit
    def shared_loads(self, own, slot, token, column):
        """What to look at for the shared partials of two columns of a token."""
        row = Int64(slot * (self.ranks * self.max_tokens) + token)
        at = own + self.layout.shared + (row * self.layout.columns + column) * 2
        between = self.max_tokens * self.layout.columns * 2
        return [(at, sender * between, sender) for sender in range(self.ranks)]

    @cute.jit
    def sum_pairs(self, pairs: cute.Tensor, mine: Uint32, rank: Int32) -> Uint32:
        """r(sum over ranks, in order) of two columns, `mine` being this rank's."""
        low, high = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(self.ranks):
            pair = cutlass.select_(rank == i, mine, pairs[i])
            low, high = low + ptx.low_float(pair), high + ptx.high_float(pair)
        return ptx.round_pair(low, high)

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


def scaled(pairs, factors, scale: Float32):
    """r(m * scale * gain) of 8 columns."""
    return [
        ptx.round_pair(
            ptx.low_float(pair) * scale * ptx.low_float(factor),
            ptx.high_float(pair) * scale * ptx.high_float(factor),
        )
        for pair, factor in zip(pairs, factors, strict=True)
    ]


def add_pairs(a: Uint32, b: Uint32) -> Uint32:
    """r(a + b) of two columns, without -0."""
    low = ptx.low_float(a) + ptx.low_float(b)
    return words.canonical(ptx.round_pair(low, ptx.high_float(a) + ptx.high_float(b)))
