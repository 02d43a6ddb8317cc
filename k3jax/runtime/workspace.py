"""A rank's workspace of the fused tail: where everything lies in it.

`docs/protocol.md` is the rule. `ffi/tail_layout.h` computes the same offsets; kernels take them as
compile-time facts, so they know no other layout than this one.
"""

import zlib
from dataclasses import dataclass

import numpy as np

MAGIC = 0x4D33424B
LAYOUT_VERSION = 1
SLOTS = 3
MAX_RANKS = 16
ARMED = 0x80000000
"""The word that nobody publishes: the bfloat16 pair (+0, -0)."""

RANK_WORD = 3
EPOCH_WORD = 8
ARRIVALS_WORD = 9
PREVIOUS_WORD = 10
FAILED_WORD = 11
AWAITED_WORD = 12
NOTE_WORD = 14
PEERS_WORD = 16
HEADER_WORDS = 64
"""Positions in the header, in 32-bit words."""


@dataclass(frozen=True)
class TailLayout:
    """Byte offsets in one rank's workspace: header, then four mailboxes of bfloat16.

    Attributes:
        ranks: R, the size of the group.
        max_tokens: M, the most tokens of a call.
        latent_size: L.
        hidden_size: H.
    """

    ranks: int
    max_tokens: int
    latent_size: int
    hidden_size: int

    @property
    def columns(self) -> int:
        """Output columns that a rank owns."""
        return self.hidden_size // self.ranks

    @property
    def latent(self) -> int:
        """[SLOTS, R, M, L]: partial latents, by sender."""
        return HEADER_WORDS * 4

    @property
    def shared(self) -> int:
        """[SLOTS, R, M, H / R]: shared partials of the columns owned here, by sender."""
        return self.latent + SLOTS * self.ranks * self.max_tokens * self.latent_size * 2

    @property
    def normed(self) -> int:
        """[SLOTS, M, L]: finished latents, stored by the row's owner."""
        return self.shared + SLOTS * self.ranks * self.max_tokens * self.columns * 2

    @property
    def output(self) -> int:
        """[SLOTS, M, H]: the result, stored by the owners of its columns."""
        return self.normed + SLOTS * self.max_tokens * self.latent_size * 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole workspace."""
        return self.output + SLOTS * self.max_tokens * self.hidden_size * 2

    @property
    def slot(self) -> int:
        """The number under which the native library knows a device's workspace of this layout."""
        return zlib.crc32(repr(self).encode()) & 0x7FFFFFFF

    def armed(self, rank: int, peers: list[int]) -> np.ndarray:
        """A fresh workspace as uint32 words: the header of `rank`, every mailbox word armed.

        Args:
            rank: whose workspace.
            peers: address of every rank's workspace, as the device of `rank` sees it.
        """
        words = np.full(self.num_bytes // 4, ARMED, np.uint32)
        words[:HEADER_WORDS] = 0
        facts = (self.ranks, rank, self.max_tokens, self.latent_size, self.hidden_size)
        words[:7] = (MAGIC, LAYOUT_VERSION, *facts)
        table = np.zeros(MAX_RANKS, np.uint64)
        table[: self.ranks] = peers
        words[PEERS_WORD : PEERS_WORD + 2 * MAX_RANKS] = table.view(np.uint32)
        note = np.array([peers[rank] + AWAITED_WORD * 4], np.uint64)  # as no host reads it
        words[NOTE_WORD : NOTE_WORD + 2] = note.view(np.uint32)
        return words
