"""Router logits of a few tokens: bf16 x [T, H] times bf16 weight [E, H], as float32 partial sums.

The weights (12.8 MB at E=896, H=7168) are read once and bound the time, so the kernel is built
around having all of them in flight at once:

- Block (group, split) owns `row_tiles` tiles of 8 experts and one slice of H; a warp owns one tile.
  The grid fits the device in one wave, so no block has a second round of loads to wait for.
- At entry every lane issues the 16-byte loads of its whole share, straight into registers, before
  `griddepcontrol.wait`: weights do not depend on the previous kernel, x does. Four lanes cover 64
  adjacent bytes of a row and hint the L2 to fetch 128, the other half being the warp's next load.
- The next kernel may start once these loads are issued. Any earlier, and its loads would queue in
  front of ours; after the wait, and nothing would overlap (either costs 1 us a launch on H200).
- After the wait the block copies its slice of x to shared memory (cp.async, so that no register is
  held and no weight load is waited for), crosses one barrier, and multiplies: m16n8k16 with 16
  tokens as A and 8 experts as B. A lane's 16 bytes are 8 adjacent k of one expert, where the
  instruction wants 2 + 2 at distance 8; as x is read in the same permuted order, the sum over k is
  the same and no shuffle is needed.
- Slices of H are summed by the reader of `partials`, in ascending order. The sums of a token depend
  neither on the other tokens nor on timing.

Nothing waits for another block, so the kernel cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.runtime.program import Kernel

TILE_EXPERTS = 8
"""Experts of one tile: N of the matrix instruction."""
STEP = 32
"""Elements of H that one 16-byte load a lane covers: two matrix instructions."""


@dataclass(frozen=True)
class LogitsKernel(Kernel):
    """Partial logits over slices of the hidden size.

        partials[s, t, e] = sum over k in slice s of x[t, k] * weight[e, k]

    Attributes:
        num_experts: E, a multiple of 8 * row_tiles.
        hidden_size: H, a multiple of 32 * k_splits.
        row_tiles: tiles of 8 experts in a block, one a warp.
        k_splits: slices of H.
        max_tokens: most tokens of a launch: 8, or a multiple of 16.
    """

    num_experts: int
    hidden_size: int
    row_tiles: int
    k_splits: int
    max_tokens: int

    parameters = (
        ("x", "address"),
        ("weight", "address"),
        ("partials", "address"),
        ("num_tokens", "int32"),
    )

    @property
    def threads(self) -> int:
        """One warp a tile."""
        return 32 * self.row_tiles

    @property
    def grid(self) -> tuple[int, int, int]:
        """Groups of experts by slices of H."""
        return self.num_experts // (TILE_EXPERTS * self.row_tiles), self.k_splits, 1

    @property
    def steps(self) -> int:
        """Matrix steps of a warp, each one 16-byte load a lane."""
        return self.hidden_size // (STEP * self.k_splits)

    @property
    def token_bytes(self) -> int:
        """Stride of a token in shared memory: an odd multiple of 64 bytes.

        Two adjacent tokens then lie in different halves of the 128 bytes of the banks, and the
        eight lanes of one phase of a 16-byte read (2 tokens x 4 lanes) never collide.
        """
        return 64 * (self.steps | 1)

    @property
    def shared_bytes(self) -> int:
        """The slice of x, all tokens."""
        return self.max_tokens * self.token_bytes

    @cute.jit
    def load_weights(self, address: Int64):
        """Issues all loads of a lane; `address` is that of its first 16 bytes."""
        words = []
        for step in cutlass.range_constexpr(self.steps):
            words.append(
                cute.arch.inline_ptx(
                    "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 "
                    "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                    write_only_types=[Uint32] * 4,
                    read_only_args=[address + step * STEP * 2],
                )
            )
        return words

    @cute.jit
    def stage_tokens(self, x: Int64, shared: Uint32, num_tokens: Int32):
        """Copies x[:, slice] to shared memory; `x` is the address of the slice of token 0."""
        thread, _, _ = cute.arch.thread_idx()
        chunks = self.steps * STEP * 2 // 16
        for chunk in cutlass.range(thread, num_tokens * chunks, self.threads):
            token = chunk // chunks
            offset = (chunk % chunks) * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[
                    shared + Uint32(token * self.token_bytes + offset),
                    x + Int64(token) * (self.hidden_size * 2) + offset,
                ],
            )
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    @cute.jit
    def load_tokens(self, shared: Uint32, token: Int32, num_tokens: Int32, offset: Int32):
        """16 bytes of a token; rows past the last token repeat it, their sums are dropped."""
        row = cutlass.min(token, num_tokens - 1)
        return cute.arch.inline_ptx(
            "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[shared + Uint32(row * self.token_bytes + offset)],
        )

    @cute.jit
    def store(self, address: Int64, token: Int32, num_tokens: Int32, low, high):
        """Two adjacent experts of one token; `address` is that of token 0."""
        if token < num_tokens:
            cute.arch.inline_ptx(
                "st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                read_only_args=[address + Int64(token) * (self.num_experts * 4), low, high],
            )

    @cute.kernel
    def device(self, x: Int64, weight: Int64, partials: Int64, num_tokens: Int32):
        """One block of the schedule above."""
        thread, _, _ = cute.arch.thread_idx()
        group, split, _ = cute.arch.block_idx()
        row, quad = (thread % 32) // 4, thread % 4
        tile = (group * self.row_tiles + thread // 32) * TILE_EXPERTS
        first_k = split * (self.steps * STEP)

        weights = self.load_weights(
            weight + (Int64(tile + row) * self.hidden_size + first_k + quad * 8) * 2
        )
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        shared = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        self.stage_tokens(x + Int64(first_k) * 2, shared, num_tokens)

        blocks = (self.max_tokens + 15) // 16
        zero = Float32(0.0)
        # Two chains of dependent matrix instructions for each 16 tokens, added at the end.
        sums = [[(zero, zero, zero, zero), (zero, zero, zero, zero)] for _ in range(blocks)]
        for step in cutlass.range_constexpr(self.steps):
            for block in cutlass.range_constexpr(blocks):
                token = block * 16 + row
                offset = step * STEP * 2 + quad * 16
                low = self.load_tokens(shared, token, num_tokens, offset)
                high = (Uint32(0),) * 4
                if cutlass.const_expr(self.max_tokens > 8):
                    high = self.load_tokens(shared, token + 8, num_tokens, offset)
                for half in cutlass.range_constexpr(2):
                    sums[block][half] = _multiply(
                        low[2 * half : 2 * half + 2],
                        high[2 * half : 2 * half + 2],
                        weights[step][2 * half : 2 * half + 2],
                        sums[block][half],
                    )
        out = partials + (Int64(split) * num_tokens * self.num_experts + tile + quad * 2) * 4
        for block in cutlass.range_constexpr(blocks):
            total = [a + b for a, b in zip(*sums[block], strict=True)]
            self.store(out, block * 16 + row, num_tokens, total[0], total[1])
            if cutlass.const_expr(self.max_tokens > 8):
                self.store(out, block * 16 + row + 8, num_tokens, total[2], total[3])


def _multiply(low, high, weights, sums):
    """16 tokens x 16 k times 16 k x 8 experts: a lane's tokens `row` (low) and `row + 8` (high)."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[low[0], high[0], low[1], high[1], *weights, *sums],
    )


REPRESENTATIVES = {
    f"logits of K3, up to {tokens} tokens": LogitsKernel(
        num_experts=896, hidden_size=7168, row_tiles=7, k_splits=8, max_tokens=tokens
    )
    for tokens in (8, 16, 32)
}
