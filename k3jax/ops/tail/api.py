"""The latent tail over ranks: reduce, norm, up-projection, shared add, in one of several orders."""

from enum import StrEnum

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import MoEConfig
from k3jax.ops.rounding import to_bfloat16
from k3jax.ops.tail import fused, reference
from k3jax.parallel import Parallel, RankGroup
from k3jax.runtime import processes
from k3jax.runtime.target import Target


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


def fusion_refusal(config: MoEConfig, num_tokens: int, tp: int, target: Target) -> str | None:
    """Why the fused tail cannot run; None if it can."""
    if tp == 1:
        return "tp is 1: there is nothing to reduce"
    if not config.num_shared_experts:
        return "the config has no shared expert"
    if not config.latent_norm:
        return "the config has no latent norm"
    return fused.unsupported(
        ranks=tp,
        latent_size=config.latent_size,
        hidden_size=config.hidden_size,
        num_tokens=num_tokens,
        target=target,
    )


def create_workspaces(config: MoEConfig, parallel: Parallel, facts: str = "") -> None:
    """Makes the fused tail's mailboxes of this process's devices, once for each group of ranks.

    Devices that are only described, for a compile without them, get none. Where the mesh spans
    processes, each calls this while it traces; first they compare what they trace.

    Args:
        config: the layer.
        parallel: its mesh.
        facts: what else the program depends on and all processes must have alike.

    Raises:
        ValueError: processes trace different layers, or a device is in another group already.
        NotImplementedError: a group spans machines.
        RuntimeError: a process did not come, or could not make its mailboxes.
    """
    own, real = jax.process_index(), set(jax.devices())
    groups = [devices for devices in parallel.device_groups() if set(devices) <= real]
    homes = {device.process_index for devices in groups for device in devices}
    if len(homes) > 1:
        processes.agree("the fused tail", homes, f"{facts}, tp={parallel.tp}, {config}")
    for devices in groups:
        if own in {device.process_index for device in devices}:
            fused.tail_workspaces(devices, config.latent_size, config.hidden_size).create()


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
    target: Target | None = None,
    routes: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """r(r(RMSNorm(sum_ranks m) W_up^T) + sum_ranks shared).

    Args:
        m: bfloat16 [T, L], this rank's partial of the weighted expert sum; or its terms unweighted
            [T, K, L], with `routes`, for the fused tier.
        shared: bfloat16 [T, H], this rank's partial of the shared expert, or None.
        gain: bfloat16 [L], or None for no norm.
        up_proj: bfloat16 [H, L], replicated.
        eps: epsilon of the norm.
        group: the ranks.
        tier: how.
        scattered: return only this rank's H / tp columns.
        target: device that the fused tier's kernel is compiled for.
        routes: ids int32 [T, K], -1 for a dropped term, and weights float32 [T, K].

    Returns:
        bfloat16 [T, H], or [T, H / tp] if scattered.
    """
    if tier == TailTier.TAIL_FUSION:
        assert shared is not None, "refused by fusion_refusal"
        assert gain is not None, "refused by fusion_refusal"
        ids, weights = routes or (None, None)
        return fused.fused_tail(
            m,
            shared,
            gain,
            up_proj,
            eps=eps,
            group=group,
            target=target or Target.current(),
            number=group.number(),
            weights=weights,
            ids=ids,
            scattered=scattered,
        )
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
