"""The routed experts: one function, several implementations of the same numbers."""

from enum import StrEnum

import jax

from k3jax.config import MoEConfig
from k3jax.ops.experts import reference, xla
from k3jax.ops.gradient import without_gradient
from k3jax.params import ExpertParams


class ExpertsTier(StrEnum):
    """How the routed experts are computed.

    Attributes:
        XLA: sort by expert, then dequantise and multiply the experts that were chosen.
        REFERENCE: one route at a time; slow, differentiable in z and the weights.
    """

    XLA = "xla"
    REFERENCE = "reference"


_ROWS = {
    ExpertsTier.REFERENCE: reference.rows,
    ExpertsTier.XLA: without_gradient(
        xla.rows, name="experts='xla'", remedy="plan the layer with experts='reference'"
    ),
}


def routed_experts(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    params: ExpertParams,
    *,
    config: MoEConfig,
    tier: ExpertsTier,
) -> jax.Array:
    """sum_k weights[:, k] * expert_{ids[:, k]}(z): bfloat16 [T, L]; one rank's partial under TP.

    Each expert is r(r(SiTU(r(z W1^T), r(z W3^T))) W2^T) with float32 sums and r() rounding to
    bfloat16; the sum over slots runs in float32 in slot order and is rounded once.

    Args:
        z: bfloat16 [T, L].
        ids: int32 [T, K]; -1 is dropped.
        weights: float32 [T, K].
        params: MXFP4 experts, w1 and w3 [E, I, L], w2 [E, L, I].
        config: betas of SiTU.
        tier: implementation.
    """
    betas = (config.situ_beta, config.situ_linear_beta)
    rows = _ROWS[tier](z, ids, params, betas)
    return reference.combine(rows, ids, weights)
