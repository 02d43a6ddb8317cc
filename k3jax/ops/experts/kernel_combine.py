"""Weighted sum of the rows of each token, where they are too many to stay in shared memory.

One block a token; a thread adds 8 columns over the slots in order. It waits for nothing but the
launch before it, so it cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.runtime.program import Kernel


@dataclass(frozen=True)
class CombineKernel(Kernel):
    """out[t] = sum over slots of weights[t, s] * rows[t, s]: float32 sum, rounded once.

    Attributes:
        num_experts: E; slots with ids outside 0 .. E - 1 are left out.
        latent: L, a multiple of 8, at most 8192.
        top_k: slots a token.
    """

    num_experts: int
    latent: int
    top_k: int

    parameters = (
        ("rows", "address"),
        ("ids", "address"),
        ("weights", "address"),
        ("out", "address"),
    )

    @property
    def threads(self) -> int:
        """Eight columns a thread."""
        return self.latent // 8

    @cute.kernel
    def device(self, rows: Int64, ids: Int64, weights: Int64, out: Int64):
        """One token."""
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        sums = cute.make_rmem_tensor((8,), Float32)
        for index in cutlass.range_constexpr(8):
            sums[index] = Float32(0.0)
        policy = ptx.evict_first_policy()  # nothing reads the rows again
        first = Int64(token) * self.top_k
        source = rows + first * (2 * self.latent) + thread * 16
        for slot in cutlass.range_constexpr(self.top_k):
            words = ptx.load_hinted_4(source + slot * (2 * self.latent), policy)
            expert = ptx.load_global(ids + (first + slot) * 4)
            weight = ptx.load_global_float(weights + (first + slot) * 4)
            if Uint32(expert) < Uint32(self.num_experts):
                for word in cutlass.range_constexpr(4):
                    low, high = ptx.low_float(words[word]), ptx.high_float(words[word])
                    sums[2 * word] = ptx.fused(weight, low, sums[2 * word])
                    sums[2 * word + 1] = ptx.fused(weight, high, sums[2 * word + 1])
        target = out + Int64(token) * (2 * self.latent) + thread * 16
        for word in cutlass.range_constexpr(4):
            pair = ptx.round_pair(sums[2 * word], sums[2 * word + 1])
            ptx.store_global(target + word * 4, pair)


REPRESENTATIVES = {"sum of 16 rows": CombineKernel(num_experts=896, latent=3584, top_k=16)}
