"""The routed experts: one function, several implementations of the same numbers."""

import functools
from enum import StrEnum

import jax
import jax.numpy as jnp

from k3jax.config import MoEConfig
from k3jax.ops.experts import decode, grouped, reference, xla
from k3jax.ops.experts.packing import PackedExperts, check_packed, pack_params
from k3jax.ops.gradient import without_gradient
from k3jax.parallel import Parallel
from k3jax.params import ExpertParams, MoEParams
from k3jax.runtime.ffi import call_program, platform_choice
from k3jax.runtime.target import Target


class ExpertsTier(StrEnum):
    """How the routed experts are computed.

    Attributes:
        DECODE: one custom call for small batches, on experts in kernel order.
        GROUPED: one custom call for larger batches on Hopper, on experts in kernel order.
        XLA: sort by expert, then dequantise and multiply the experts that were chosen.
        REFERENCE: one route at a time; slow, differentiable in z and the weights.
        W4A8: other numbers, by request only: activations rounded to MXFP8 in front of each product.
    """

    DECODE = "decode"
    GROUPED = "grouped"
    XLA = "xla"
    REFERENCE = "reference"
    W4A8 = "w4a8"


UNPACKED = "the experts are in the checkpoint's order: convert them with k3jax.prepare_params"
"""Why kernels that exist for a device do not run."""


def reads_kernel_order(config: MoEConfig, tp: int = 1, target: Target | None = None) -> bool:
    """Whether the device (the current one if None) has kernels for these experts."""
    return decode.refusal(config, 1, tp, target or Target.current()) is None


def prepare_params(
    params: MoEParams,
    config: MoEConfig,
    parallel: Parallel | None = None,
    target: Target | None = None,
) -> MoEParams:
    """`params` in the order that the device's kernels read, unchanged where it has none.

    Call it once after loading. Experts go into kernel order rank by rank; input and output exist at
    once, so drop the input.

    Args:
        params: the layer's parameters.
        config: the layer.
        parallel: mesh and axis for tensor parallelism.
        target: the device; the current one if None.
    """
    if reads_kernel_order(config, parallel.tp if parallel else 1, target):
        return pack_params(params, config, parallel)
    return params


_ROWS = {
    ExpertsTier.REFERENCE: reference.rows,
    ExpertsTier.XLA: xla.rows,
    ExpertsTier.W4A8: functools.partial(xla.rows, expert=reference.expert_w4a8),
}
_KERNELS = {
    ExpertsTier.DECODE: (decode.decode_program, decode.MAX_TOKENS),
    ExpertsTier.GROUPED: (grouped.grouped_program, grouped.CALL_TOKENS),
}
"""What builds the program of a call, and the most tokens of one call."""
_DIFFERENTIABLE = (ExpertsTier.REFERENCE,)


def routed_experts(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertParams | PackedExperts,
    *,
    config: MoEConfig,
    tier: ExpertsTier,
    tp: int = 1,
    target: Target | None = None,
    weighted: bool = True,
) -> jax.Array:
    """sum_k weights[:, k] * expert_{ids[:, k]}(z): bfloat16 [T, L]; one rank's partial under TP.

    Each expert is r(r(SiTU(r(z W1^T), r(z W3^T))) W2^T) with float32 sums and r() rounding to
    bfloat16; the sum over slots runs in float32 in slot order and is rounded once.

    Args:
        z: bfloat16 [T, L].
        ids: int32 [T, K]; -1 is dropped.
        weights: float32 [T, K].
        params: MXFP4 experts, w1 and w3 [E, I, L], w2 [E, L, I], in either order; the kernels'
            tiers need kernel order.
        config: betas of SiTU.
        tier: implementation; the kernels' tiers are the XLA tier anywhere but on CUDA.
        tp: ranks that split the experts.
        target: device that kernels are compiled for.
        weighted: the sum; or its terms unweighted, [T, K, L], zeros where an id is -1.
    """
    if tier in _KERNELS:
        target = target or Target.current()
        kernel = functools.partial(
            run_kernels, tier=tier, config=config, tp=tp, target=target, weighted=weighted
        )
        plain = functools.partial(
            routed_experts, config=config, tier=ExpertsTier.XLA, weighted=weighted
        )
        return platform_choice(kernel, plain)(z, ids, weights, params)
    betas = (config.situ_beta, config.situ_linear_beta)
    compute = _ROWS[tier]
    if tier not in _DIFFERENTIABLE:
        remedy = "plan the layer with experts='reference'"
        compute = without_gradient(compute, name=f"experts={tier.value!r}", remedy=remedy)
    rows = compute(z, ids, params, betas)
    return reference.combine(rows, ids, weights) if weighted else rows


def run_kernels(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    packed: PackedExperts,
    *,
    tier: ExpertsTier,
    config: MoEConfig,
    tp: int,
    target: Target,
    weighted: bool = True,
) -> jax.Array:
    """The custom calls of a tier, on experts in kernel order; no tokens need no call."""
    inner = config.expert_intermediate_size // tp
    check_packed(packed, config.num_experts, config.latent_size, inner)
    build, most = _KERNELS[tier]
    parts = []
    for first in range(0, z.shape[0], most):
        part = tuple(array[first : first + most] for array in (z, ids, weights))
        program = build(config, part[0].shape[0], tp, target, weighted)
        parts += call_program(program, *part, packed.gate_up, packed.down, target=target)
    if not parts:
        slots = () if weighted else ids.shape[1:]
        return jnp.zeros((0, *slots, config.latent_size), jnp.bfloat16)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
