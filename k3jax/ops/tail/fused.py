"""Tier 0: the whole tail in one custom call over peer memory (docs/protocol.md).

On CPU devices the call is the native library's host implementation of the same protocol.
"""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.parallel import RankGroup
from k3jax.runtime import ffi
from k3jax.runtime.program import ArraySpec

RANKS = (2, 4, 8, 16)
MAX_TOKENS = 128
"""Tokens that the mailboxes are made for."""

ONE_SHOT_ROWS = 64
"""Most rows of partial latent (tokens times ranks) that every rank sums for itself."""

K_BLOCKS = 8
"""Blocks of a cluster: the most that every device with clusters takes."""

WARPS = 16
"""Warps of a block."""

MOST_GROUPS = 14
"""Clusters of a rank: 112 blocks, which fit beside one another on 132 multiprocessors."""

TILE_ROWS, STEP = 16, 32
"""Rows and columns of a warp's step through the up-projection; facts of the kernel."""

BUDGET_MS = 20_000
"""How long the host implementation waits for another rank."""


def kernel_facts(
    ranks: int, latent_size: int, hidden_size: int, num_tokens: int
) -> dict[str, int | bool]:
    """How a rank's blocks share the work of a call; static facts of `TailKernel`.

    Eight blocks of a cluster split K, clusters split the rows, and a block's warps split its row
    tiles and, while there are warps, its slice of K once more. More tokens take more shared memory.
    """
    tiles = hidden_size // ranks // TILE_ROWS
    groups = max(n for n in range(1, MOST_GROUPS + 1) if tiles % n == 0)
    steps = latent_size // (K_BLOCKS * STEP)
    parts = max(n for n in range(1, steps + 1) if steps % n == 0 and tiles // groups * n <= WARPS)
    few = num_tokens <= K_BLOCKS
    return {
        "ranks": ranks,
        "latent_size": latent_size,
        "hidden_size": hidden_size,
        "groups": groups,
        "k_blocks": K_BLOCKS,
        "k_parts": parts,
        "warps": WARPS,
        "round_tokens": 1 if few else 8 if ranks >= 8 else 4,
        "two_shot": goes_in_two_shots(num_tokens, ranks),
    }


def goes_in_two_shots(num_tokens: int, ranks: int) -> bool:
    """Whether each row is summed by one rank and sent on, rather than by every rank."""
    return num_tokens * ranks > ONE_SHOT_ROWS


def fused_tail_host(
    latent: jax.Array,
    shared: jax.Array,
    gain: jax.Array,
    up_proj: jax.Array,
    *,
    eps: float,
    group: RankGroup,
    number: jax.Array | int = 0,
    weights: jax.Array | None = None,
    ids: jax.Array | None = None,
    scattered: bool = False,
    max_tokens: int = MAX_TOKENS,
    two_shot: bool | None = None,
    budget_ms: int = BUDGET_MS,
) -> jax.Array:
    """The fused tail on CPU devices; see `fused_tail`.

    Args:
        number: tells groups of one process apart; the same on all ranks of a group.
        two_shot: overrides `goes_in_two_shots`.
        budget_ms: how long to wait for another rank before the call fails.
    """
    num_tokens = latent.shape[0]
    if two_shot is None:
        two_shot = goes_in_two_shots(num_tokens, group.size)
    place = jnp.stack([jnp.int32(number), jnp.int32(group.index())])
    unfinalised = () if weights is None else (weights, ids)
    width = shared.shape[1] // group.size if scattered else shared.shape[1]
    return ffi.call_host(
        ffi.TAIL_TARGET,
        ArraySpec((num_tokens, width), np.dtype(jnp.bfloat16)),
        *(place, latent, *unfinalised, shared, gain, up_proj),
        ranks=np.int64(group.size),
        max_tokens=np.int64(max_tokens),
        eps=np.float32(eps),
        two_shot=np.bool_(two_shot),
        scattered=np.bool_(scattered),
        budget_ms=np.int64(budget_ms),
    )
