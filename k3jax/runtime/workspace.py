"""A rank's workspace of the fused tail: where everything lies in it, and its life on GPUs.

`docs/protocol.md` is the rule. `ffi/tail_layout.h` computes the same offsets; kernels take them as
compile-time facts, so they know no other layout than this one. On CPU devices the native library
makes workspaces by itself, in the first call.
"""

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3jax.runtime import library

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
        return words


@dataclass(frozen=True)
class TailWorkspaces:
    """The workspaces of one group whose GPUs are all in this process.

    Programs of the fused tail run only after `create`. A workspace stays for the life of the
    process and serves all layers and programs of the group, one program at a time.

    Attributes:
        layout: of each workspace.
        devices: the device of each rank, by the CUDA driver's ordinal.
    """

    layout: TailLayout
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that there is one device a rank."""
        if len(self.devices) != self.layout.ranks or len(set(self.devices)) != len(self.devices):
            raise ValueError(
                f"devices={self.devices} must be {self.layout.ranks} different ones, one a rank"
            )

    def create(self) -> None:
        """Allocates and arms the workspaces; does nothing if they exist.

        Raises:
            RuntimeError: a device cannot address another one's memory, or is in another group.
        """
        self._call("k3jax_tail_create", *self._sizes, self.layout.slot)

    def check(self) -> None:
        """Waits for the devices, then raises RuntimeError if a rank gave up waiting for another.

        Such a call, and all since, returned NaN. `reset` makes the group usable again.
        """
        self._call("k3jax_tail_check", self.layout.slot)

    def reset(self) -> None:
        """Waits for the devices and arms everything anew, on all ranks."""
        self._call("k3jax_tail_reset", *self._sizes, self.layout.slot)

    @property
    def _sizes(self) -> Sequence[int]:
        return self.layout.max_tokens, self.layout.latent_size, self.layout.hidden_size

    def _call(self, name: str, *numbers: int) -> None:
        function = getattr(library.load_library(), name)
        function.restype = ctypes.c_char_p
        devices = (ctypes.c_int32 * len(self.devices))(*self.devices)
        values = [ctypes.c_int64(number) for number in (len(self.devices), *numbers)]
        message = function(devices, *values)
        if message is not None:
            raise RuntimeError(message.decode())
