"""The routed experts in plain JAX: the specification of every implementation."""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.activation import situ_glu
from k3jax.ops.rounding import to_bfloat16
from k3jax.params import ExpertParams
from k3jax.quant import mxfp8
from k3jax.quant.mxfp4 import Mxfp4Array


def expert(z: jax.Array, params: ExpertParams, index, betas) -> jax.Array:
    """Rows z [N, L] through expert `index`: bfloat16 [N, L], rounded where W4A16 rounds.

        g = r(z W1^T), u = r(z W3^T), h = r(SiTU(g, u)), y = r(h W2^T)

    with r() rounding to bfloat16 and every sum in float32.
    """

    w1, w3, w2 = params.expert(index)
    gate, up = to_bfloat16(_linear(z, w1)), to_bfloat16(_linear(z, w3))
    hidden = to_bfloat16(situ_glu(gate, up, *betas))
    return to_bfloat16(_linear(hidden, w2))


def expert_w4a8(z: jax.Array, params: ExpertParams, index, betas) -> jax.Array:
    """Like `expert`, with MXFP8 activations in front of both products.

        h = q(SiTU(q(z) W1^T, q(z) W3^T)), y = r(h W2^T)

    with q() rounding to MXFP8 in groups of 32 along the contraction axis, and gate, up and their
    activation in float32. Every MXFP8 and MXFP4 value is a bfloat16, so the products are those of a
    block-scaled MXFP8 by MXFP4 matrix instruction; only the order of the float32 sums differs.
    """
    w1, w3, w2 = params.expert(index)
    z = mxfp8.quantize(z).dequantize()
    hidden = mxfp8.quantize(situ_glu(_linear(z, w1), _linear(z, w3), *betas)).dequantize()
    return to_bfloat16(_linear(hidden, w2))


def _linear(rows: jax.Array, matrix: Mxfp4Array) -> jax.Array:
    weight = matrix.dequantize()
    return jnp.einsum("nk,mk->nm", rows, weight, preferred_element_type=jnp.float32)


def rows(z: jax.Array, ids: jax.Array, params: ExpertParams, betas, expert=expert) -> jax.Array:
    """One unweighted row a slot: bfloat16 [T, K, L]; slots with id -1 are zero."""

    def route(token_and_id):
        row, index = token_and_id
        y = expert(row[None], params, jnp.maximum(index, 0), betas)[0]
        return jnp.where(index >= 0, y, 0)

    repeated = jnp.repeat(z, ids.shape[1], axis=0)
    return lax.map(route, (repeated, ids.reshape(-1))).reshape(*ids.shape, z.shape[1])


def combine(rows: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Weighted sum of rows [T, K, L] over the slots in order 0..K-1: float32, rounded once."""
    total = jnp.zeros_like(rows[:, 0], dtype=jnp.float32)
    for slot in range(rows.shape[1]):
        used = (ids[:, slot] >= 0)[:, None]
        term = weights[:, slot, None] * rows[:, slot].astype(jnp.float32)
        total = total + jnp.where(used, term, 0.0)
    return to_bfloat16(total)


def routed_experts(z, ids, weights, params: ExpertParams, betas) -> jax.Array:
    """sum_k weights[:, k] * expert_{ids[:, k]}(z): bfloat16 [T, L].

    Args:
        z: bfloat16 [T, L].
        ids: int32 [T, K]; -1 is dropped.
        weights: float32 [T, K].
        params: the experts in checkpoint order.
        betas: (beta, linear_beta) of SiTU.
    """
    return combine(rows(z, ids, params, betas), ids, weights)
