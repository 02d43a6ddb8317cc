"""The shared expert in plain JAX: the specification, and what the library runs everywhere."""

import jax
import jax.numpy as jnp

from k3jax.ops.activation import situ_glu
from k3jax.ops.rounding import to_bfloat16
from k3jax.params import SharedExpertParams


def shared_expert(x: jax.Array, params: SharedExpertParams, betas) -> jax.Array:
    """One gated MLP on every token, ungated and unscaled: bfloat16 [T, H].

        r(h Wd^T) with h = r(SiTU(r(x Wg^T), r(x Wu^T)))

    Sums are float32, r() rounds to bfloat16. With Wg and Wu split by rows and Wd by columns over
    ranks, the result is one rank's partial sum.

    Args:
        x: bfloat16 [T, H].
        params: gate_proj [S, H], up_proj [S, H], down_proj [H, S], bfloat16.
        betas: (beta, linear_beta) of SiTU.
    """

    def linear(rows, weight):
        product = jnp.einsum("tk,mk->tm", rows, weight, preferred_element_type=jnp.float32)
        return to_bfloat16(product)

    gate, up = linear(x, params.gate_proj), linear(x, params.up_proj)
    return linear(to_bfloat16(situ_glu(gate, up, *betas)), params.down_proj)
