"""SiTU-GLU, the gated activation of routed and shared experts."""

import jax
import jax.numpy as jnp


def situ_glu(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float | None) -> jax.Array:
    """Soft-capped gate times soft-capped linear branch, in float32.

        beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)

    The sigmoid takes the raw gate. With linear_beta=None, `up` passes through unchanged.

    Args:
        gate: any float, any shape.
        up: like gate.
        beta: cap of the gate, positive.
        linear_beta: cap of the linear branch, positive, or None.

    Returns:
        float32, the shape of gate.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if linear_beta is not None:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up
