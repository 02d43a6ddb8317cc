"""The latent tail over ranks: reduce, norm, up-projection, shared add, in one of several orders."""

from enum import StrEnum

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.rounding import to_bfloat16
from k3jax.ops.tail import reference
from k3jax.parallel import RankGroup


class TailTier(StrEnum):
    """How the tail is computed; all agree within rounding.

    Attributes:
        UNFUSED: reduce both, norm, up-projection, add. One rank, no shared expert, or scattered.
        TAIL_FUSION: one custom call over peer memory.
        ALLREDUCE_OVERLAP: full up-projection on every rank beside the shared expert's all-reduce.
        COLUMN_PARALLEL: each rank up-projects its columns into its shared partial; one all-reduce.
    """

    UNFUSED = "unfused"
    TAIL_FUSION = "tail_fusion"
    ALLREDUCE_OVERLAP = "allreduce_overlap"
    COLUMN_PARALLEL = "column_parallel"


def latent_tail(
    m: jax.Array,
    shared: jax.Array | None,
    gain: jax.Array | None,
    up_proj: jax.Array,
    *,
    eps: float,
    group: RankGroup,
    tier: TailTier,
    scattered: bool = False,
) -> jax.Array:
    """r(r(RMSNorm(sum_ranks m) W_up^T) + sum_ranks shared).

    Args:
        m: bfloat16 [T, L], this rank's partial of the weighted expert sum.
        shared: bfloat16 [T, H], this rank's partial of the shared expert, or None.
        gain: bfloat16 [L], or None for no norm.
        up_proj: bfloat16 [H, L], replicated.
        eps: epsilon of the norm.
        group: the ranks.
        tier: how.
        scattered: return only this rank's H / tp columns.

    Returns:
        bfloat16 [T, H], or [T, H / tp] if scattered.
    """
    latent = _sum(m, group)
    if tier == TailTier.ALLREDUCE_OVERLAP:
        # XLA would merge the two all-reduces, and the norm would wait for the shared partial. The
        # barrier orders them, so that the second one runs beside the up-projection.
        latent, shared = lax.optimization_barrier((latent, shared))
    normed = latent if gain is None else reference.rms_norm(latent, gain, eps)
    if tier == TailTier.COLUMN_PARALLEL:
        return _column_parallel(normed, shared, up_proj, group)
    if scattered:
        out = reference.up_project(normed, _own_rows(up_proj, group))
        if shared is None:
            return out
        return out + to_bfloat16(group.reduce_scatter(shared.astype(jnp.float32)))
    out = reference.up_project(normed, up_proj)
    return out if shared is None else out + _sum(shared, group)


def _column_parallel(normed, shared, up_proj, group: RankGroup) -> jax.Array:
    """Adds this rank's columns to its shared partial, then sums all ranks' partials in bfloat16."""
    width = up_proj.shape[0] // group.size
    start = group.index() * width
    columns = lax.dynamic_slice_in_dim(shared, start, width, axis=1).astype(jnp.float32)
    product = jnp.einsum(
        "tl,hl->th", normed, _own_rows(up_proj, group), preferred_element_type=jnp.float32
    )
    merged = lax.dynamic_update_slice_in_dim(shared, to_bfloat16(columns + product), start, axis=1)
    return group.all_reduce(merged)


def _own_rows(up_proj: jax.Array, group: RankGroup) -> jax.Array:
    width = up_proj.shape[0] // group.size
    return lax.dynamic_slice_in_dim(up_proj, group.index() * width, width, axis=0)


def _sum(partial: jax.Array, group: RankGroup) -> jax.Array:
    """Sum over ranks in float32, rounded once."""
    return to_bfloat16(group.all_reduce(partial.astype(jnp.float32)))
