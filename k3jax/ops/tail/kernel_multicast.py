"""The fused tail with one store for all ranks, where a switch copies it.

Everything is as in `kernel_tail`, but what goes to all ranks is stored once, to a multicast address
that the group's workspaces share. Such an address is only ever written with `multimem`: ordinary
stores to it are not coherent with the copies. A rank's own workspace gets its copy as well; nobody
reads it where the own values are read in place, and it is re-armed like every other word.

Compiled, never run: nothing in the library makes multicast addresses yet, and no plan takes this.
"""

from dataclasses import dataclass

from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops.tail import kernel_words as words
from k3jax.ops.tail.geometry import kernel_facts
from k3jax.ops.tail.kernel_tail import TailKernel
from k3jax.runtime.workspace import MAX_RANKS, PEERS_WORD

MULTICAST_WORD = PEERS_WORD + 2 * MAX_RANKS
"""Where the header of a workspace holds its group's multicast address."""


@dataclass(frozen=True)
class MulticastTailKernel(TailKernel):
    """`TailKernel` over a multicast address."""

    architectures = ("sm_100a",)

    @cute.jit
    def send_to_all(self, smem: Uint32, rank: Int32, offset: Int64, got):
        """1 or 4 words into the workspaces of all ranks."""
        group = words.load_shared_address(smem + Uint32(MULTICAST_WORD * 4))
        words.store_multicast(group + offset, got)


REPRESENTATIVES = {
    "TP=8, 8 tokens, multicast": MulticastTailKernel(**kernel_facts(8, 3584, 7168, 8)),
    "TP=8, 64 tokens, multicast": MulticastTailKernel(**kernel_facts(8, 3584, 7168, 64)),
}
