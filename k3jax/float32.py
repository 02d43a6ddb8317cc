"""The layer in float32 with no rounding inside: the yardstick that errors are measured against."""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import MoEConfig
from k3jax.ops.activation import situ_glu
from k3jax.ops.router import reference as router
from k3jax.params import MoEParams

COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""For `jax.jit` of the layer: else XLA compiles dozens of Triton kernels for each of the float32
products, to time them, which takes tens of seconds."""


def float32_layer(params: MoEParams, x: jax.Array, config: MoEConfig) -> jax.Array:
    """The whole layer on one device: bfloat16 or float32 x [T, H] -> float32 [T, H].

    One (token, expert) pair at a time, so it is slow and its memory is one dequantised expert.
    """
    betas = (config.situ_beta, config.situ_linear_beta)
    ids, weights = router.choose(
        router.logits(x, params.gate.weight),
        params.gate.e_score_correction_bias,
        config.experts_per_token,
        config.renormalize,
        config.routed_scaling_factor,
    )
    x = x.astype(jnp.float32)
    z = _times(x, params.routed_expert_down_proj)

    def route(pair):
        row, index, weight = pair
        w1, w3, w2 = (matrix.dequantize(jnp.float32) for matrix in params.experts.expert(index))
        hidden = situ_glu(_times(row[None], w1), _times(row[None], w3), *betas)
        return weight * _times(hidden, w2)[0]

    pairs = jnp.repeat(z, ids.shape[1], axis=0), ids.reshape(-1), weights.reshape(-1)
    m = lax.map(route, pairs).reshape(*ids.shape, config.latent_size).sum(axis=1)
    if params.routed_expert_norm is not None:
        mean_square = jnp.mean(m * m, axis=1, keepdims=True)
        gain = params.routed_expert_norm.astype(jnp.float32)
        m = m * lax.rsqrt(mean_square + config.rms_norm_eps) * gain[None]
    y = _times(m, params.routed_expert_up_proj)
    if params.shared_experts is not None:
        shared = params.shared_experts
        hidden = situ_glu(_times(x, shared.gate_proj), _times(x, shared.up_proj), *betas)
        y = y + _times(hidden, shared.down_proj)
    return y


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """||got - want|| / ||want||; NaN if either holds one."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def _times(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.matmul(rows, weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
