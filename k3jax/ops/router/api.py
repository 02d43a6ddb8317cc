"""The router: which experts a token visits, and with which weights."""

from enum import StrEnum

import jax

from k3jax.config import MoEConfig
from k3jax.ops.router import cute, reference
from k3jax.params import GateParams
from k3jax.runtime.ffi import platform_choice
from k3jax.runtime.target import Target


class RouterTier(StrEnum):
    """How the router is computed.

    Attributes:
        KERNEL: a kernel chooses the experts, and computes the logits of small batches.
        XLA: XLA's matrix product and top-k; differentiable in x.
    """

    KERNEL = "kernel"
    XLA = "xla"


def kernel_refusal(config: MoEConfig, target: Target) -> str | None:
    """Why the kernel tier cannot run; None if it can."""
    if target.arch is None:
        return f"no kernels for {target.kind}"
    return cute.choose_refusal(config)


def route(
    x: jax.Array,
    params: GateParams,
    *,
    config: MoEConfig,
    tier: RouterTier,
    target: Target,
    logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by sigmoid(x Wg^T) + bias and weighs them by the sigmoid alone.

    See `reference.choose` for ties and non-finite logits.

    Args:
        x: bfloat16 [T, H].
        params: weight bfloat16 [E, H] and bias float32 [E].
        config: top-k, renormalisation and scaling.
        tier: implementation; the kernel tier is its reference anywhere but on CUDA.
        target: device that kernels are compiled for.
        logits: float32 [T, E], in place of x Wg^T.

    Returns:
        ids int32 [T, K], distinct, by descending choice; weights float32 [T, K].
    """
    bias = params.e_score_correction_bias

    def choose_plain(logits: jax.Array, bias: jax.Array):
        return reference.choose(
            logits,
            bias,
            config.experts_per_token,
            config.renormalize,
            config.routed_scaling_factor,
        )

    def route_plain(x: jax.Array, weight: jax.Array, bias: jax.Array):
        return choose_plain(reference.logits(x, weight), bias)

    if tier == RouterTier.XLA:
        if logits is None:
            return route_plain(x, params.weight, bias)
        return choose_plain(logits, bias)

    def choose_kernel(logits: jax.Array, bias: jax.Array):
        return cute.choose(logits, bias, config=config, target=target)

    def route_kernel(x: jax.Array, weight: jax.Array, bias: jax.Array):
        return cute.route(x, weight, bias, config=config, target=target)

    if logits is None:
        return platform_choice(route_kernel, route_plain)(x, params.weight, bias)
    return platform_choice(choose_kernel, choose_plain)(logits, bias)
