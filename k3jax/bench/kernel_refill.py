"""What the other ranks would have sent, put into one rank's mailboxes before it runs its tail.

Every thread copies 16-byte pieces of an image of one slot into the slot that the next call polls;
an armed piece of the image stands for words that nobody else sends, and leaves the mailbox alone.
Nothing waits, so nothing can hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.tail.kernel_words import store_words
from k3jax.runtime.program import Kernel
from k3jax.runtime.workspace import ARMED, EPOCH_WORD, SLOTS, TailLayout


@dataclass(frozen=True)
class RefillKernel(Kernel):
    """Writes an image [R T L | R T H/R | T L | T H] of bfloat16 into the slot of this epoch.

    Attributes:
        ranks: R.
        max_tokens: M of the workspace.
        latent_size: L.
        hidden_size: H.
        blocks: of the grid.
    """

    ranks: int
    max_tokens: int
    latent_size: int
    hidden_size: int
    blocks: int
    threads: int = 256
    parameters = (("image", "address"), ("workspace", "address"), ("num_tokens", "int32"))

    @cute.kernel
    def device(self, image: Int64, workspace: Int64, num_tokens: Int32):
        """One thread's pieces of the four mailboxes."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        epoch = Uint32(ptx.load_global(workspace + EPOCH_WORD * 4))
        slot = Int32(epoch % Uint32(SLOTS))
        layout = TailLayout(self.ranks, self.max_tokens, self.latent_size, self.hidden_size)
        mailboxes = (
            (layout.latent, self.ranks, self.latent_size),
            (layout.shared, self.ranks, layout.columns),
            (layout.normed, 1, self.latent_size),
            (layout.output, 1, self.hidden_size),
        )
        for start, senders, width in mailboxes:
            pieces = num_tokens * (width // 8)
            slot_bytes = senders * self.max_tokens * width * 2
            mailbox = workspace + start + Int64(slot) * slot_bytes
            for i in cutlass.range(block * self.threads + thread, senders * pieces, self.stride):
                place = mailbox + Int64(i // pieces) * (self.max_tokens * width * 2)
                self.copy(image + Int64(i) * 16, place + Int64(i % pieces) * 16)
            image = image + Int64(senders * pieces) * 16

    @property
    def stride(self) -> int:
        """Threads of the grid."""
        return self.blocks * self.threads

    @cute.jit
    def copy(self, source: Int64, place: Int64):
        """One piece, unless it is armed."""
        words = ptx.load_global_4(source)
        if words[0] != Uint32(ARMED):
            store_words(place, words)
