"""A kernel that keeps its multiprocessors and some memory busy for a while."""

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32, Int64, Uint32, cute

from k3jax.runtime.program import Kernel


@dataclass(frozen=True)
class Busy(Kernel):
    """Stores to `memory`, 4 bytes a thread, until `nanoseconds` have passed."""

    threads: int = 256
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)

    parameters: ClassVar = (("memory", "address"), ("nanoseconds", "int32"))

    @cute.kernel
    def device(self, memory: Int64, nanoseconds: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        address = memory + (block * self.threads + thread) * 4
        end = Int64(cute.arch.globaltimer()) + Int64(nanoseconds)
        while Int64(cute.arch.globaltimer()) < end:
            cute.arch.inline_ptx(
                "st.volatile.global.u32 [{$r0}], {$r1};", read_only_args=[address, Uint32(thread)]
            )
