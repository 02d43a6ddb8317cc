"""How the fused tail's kernel waits for words of its mailboxes, and stores into those of others."""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.geometry import TailGeometry
from k3jax.runtime.workspace import (
    ARMED,
    FAILED_WORD,
    NOTE_WORD,
    PEERS_WORD,
)


class Mailboxes(TailGeometry):
    """Device code over a rank's mailboxes; docs/protocol.md says what is in them."""

    @cute.jit
    def spread_thread(self) -> Int32:
        """A thread's number in its rank, such that consecutive warps lie in different blocks."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        return (thread // 32 * self.grid[0] + block) * 32 + thread % 32

    @cute.jit
    def look(self, loads, got: cute.Tensor):
        """Issues some loads of mailbox words: (address, constant offset, whose words they are)."""
        width = got.shape[0] // len(loads)
        for i in cutlass.range_constexpr(len(loads)):
            loaded = words.load_peer(loads[i][0], loads[i][1], width)
            for j in cutlass.range_constexpr(width):
                got[width * i + j] = loaded[j]

    @cute.jit
    def look_again(self, loads, rank: Int32, got: cute.Tensor):
        """The same once more; this rank's own words, found at the first look, may stay."""
        width = got.shape[0] // len(loads)
        if cutlass.const_expr(self.looks_at_peers_alone):
            for i in cutlass.range_constexpr(len(loads)):
                if loads[i][2] != rank:
                    loaded = words.load_peer(loads[i][0], loads[i][1], width)
                    for j in cutlass.range_constexpr(width):
                        got[width * i + j] = loaded[j]
        else:
            self.look(loads, got)

    @cute.jit
    def poll(self, own: Int64, epoch: Uint32, left: Int32, rank: Int32, loads, got: cute.Tensor):
        """Waits until no word of some loads is armed; returns what is left of the budget.

        Args:
            own: this rank's workspace.
            epoch: of this call.
            left: polls that remain.
            rank: of this rank, whose own words are in no mailbox and may be anything.
            loads: see `look`.
            got: what a first look found. Once the budget is spent, what is missing is NaN.
        """
        width = got.shape[0] // len(loads)
        missing = Int32(1)
        while missing != 0:
            smallest = Int32(0)
            for i in cutlass.range_constexpr(len(loads)):
                for j in cutlass.range_constexpr(width):
                    word = cutlass.select_(loads[i][2] == rank, Uint32(0), got[width * i + j])
                    smallest = words.least(word, smallest)
            missing = words.is_armed(smallest)
            left = left - missing
            if left < 0:
                missing = Int32(0)
            if missing != 0:
                self.look_again(loads, rank, got)
        if left < 0:
            self.give_up(own, epoch, rank, loads, got)
        return left

    @cute.jit
    def give_up(self, own: Int64, epoch: Uint32, rank: Int32, loads, got: cute.Tensor):
        """Notes the first rank whose words are missing, and makes them NaN."""
        width = got.shape[0] // len(loads)
        awaited = Int32(-1)
        for i in cutlass.range_constexpr(len(loads)):
            if loads[i][2] != rank:
                lost = Int32(0)
                for j in cutlass.range_constexpr(width):
                    lost = lost | words.is_armed(got[width * i + j])
                    got[width * i + j] = words.nan_if_armed(got[width * i + j])
                if (lost != 0) & (awaited < 0):
                    awaited = Int32(loads[i][2])
        if awaited >= 0:
            self.note_failure(own, epoch, awaited)

    @cute.jit
    def note_failure(self, own: Int64, epoch: Uint32, awaited: Int32):
        """Writes down the first failure of this rank: here for its next calls, and for the host."""
        if words.replace_zero(own + FAILED_WORD * 4, epoch + Uint32(1)) == Uint32(0):
            words.store_peer_word(words.load_address(own + NOTE_WORD * 4), Uint32(awaited))

    @cute.jit
    def peer(self, smem: Uint32, rank) -> Int64:
        """Address of a rank's workspace."""
        return words.load_shared_address(smem + Uint32(PEERS_WORD * 4 + rank * 8))

    @cute.jit
    def send(self, smem: Uint32, to, rank: Int32, offset: Int64, got):
        """1 or 4 words into the workspace of `to`, unless that is `rank`."""
        if to != rank:
            words.store_peer(self.peer(smem, to) + offset, got)

    @cute.jit
    def send_to_all(self, smem: Uint32, rank: Int32, offset: Int64, got):
        """1 or 4 words into the workspaces of all ranks; `rank` can do without."""
        for to in cutlass.range_constexpr(self.ranks):
            self.send(smem, to, rank, offset, got)

    @cute.jit
    def rearm(self, own: Int64, rank: Int32, slot: Int32, previous: Int32):
        """Arms what the previous call used of its slot; for the upper half of the warps."""
        layout, width = self.layout, self.latent_size * 2
        tokens, two_shot = previous // 2, previous % 2
        by_sender, row = slot * (self.ranks * self.max_tokens), slot * self.max_tokens
        first, count, stride = Int32(0), tokens, Int32(1)
        if two_shot != 0:
            count = (tokens - rank + self.ranks - 1) // self.ranks
            first, stride = rank, Int32(self.ranks)
            self.arm(own + layout.normed + Int64(row) * width, tokens * (width // 16))
        self.arm_senders(own + layout.latent, by_sender + first, count, stride, width)
        at = own + layout.shared
        self.arm_senders(at, by_sender, tokens, Int32(1), layout.columns * 2)
        at = own + layout.output + Int64(row) * (self.hidden_size * 2)
        self.arm(at, tokens * (self.hidden_size // 8))

    @cute.jit
    def arm_senders(self, mailbox: Int64, first, count, stride, width: cutlass.Constexpr):
        """Arms rows first, first + stride, .. of every sender's part of a mailbox."""
        pieces = width // 16
        total = count * (self.ranks * pieces)
        for index in cutlass.range(self.upper_thread(), total, self.grid_threads // 2):
            line = index // pieces
            row = first + line // self.ranks * stride + line % self.ranks * self.max_tokens
            self.arm_piece(mailbox + Int64(row) * width + index % pieces * 16)

    @cute.jit
    def arm(self, address: Int64, pieces: Int32):
        """Arms adjacent 16-byte pieces, spread over the grid."""
        for piece in cutlass.range(self.upper_thread(), pieces, self.grid_threads // 2):
            self.arm_piece(address + Int64(piece) * 16)

    @cute.jit
    def arm_piece(self, address: Int64):
        """Arms 16 bytes."""
        word = Uint32(ARMED)
        words.store_peer_words(address, (word, word, word, word))

    @cute.jit
    def upper_thread(self) -> Int32:
        """The same among the threads of the upper half of the warps."""
        return Int32(self.spread_thread()) - self.grid_threads // 2
