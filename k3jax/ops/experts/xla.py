"""The routed experts as XLA operations: any device, work in proportion to the rows routed.

Rows are sorted by expert and cut into units of at most `block` rows of one expert; a loop over the
units that exist dequantises one expert and multiplies its rows. No array is ever dense over the
experts, so a NaN in an unvisited expert touches nothing.

Peak memory beside inputs and output: one dequantised expert and [T * K, L] rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.experts import reference
from k3jax.parallel import zeros_varying
from k3jax.params import ExpertParams

_BLOCKS = (8, 32, 128)


def rows(
    z: jax.Array, ids: jax.Array, params: ExpertParams, betas, expert=reference.expert
) -> jax.Array:
    """Same contract as `reference.rows`."""
    num_tokens, top_k = ids.shape
    some_weights = jax.tree.leaves(params)[0]
    num_experts = some_weights.shape[0]
    num_rows = num_tokens * top_k
    if not num_rows:
        return zeros_varying((0, top_k, z.shape[1]), jnp.bfloat16, z, ids, some_weights)
    block = next((b for b in _BLOCKS if b * num_experts >= num_rows), _BLOCKS[-1])

    flat = ids.reshape(-1)
    flat = jnp.where(flat >= 0, flat, num_experts)
    order = jnp.argsort(flat, stable=True)
    starts, counts = _segments(flat[order], num_experts)
    first_unit = jnp.cumsum((counts + block - 1) // block)

    def unit(index, sorted_rows):
        owner = jnp.searchsorted(first_unit, index, side="right").astype(jnp.int32)
        before = jnp.where(owner > 0, first_unit[owner - 1], 0)
        start = starts[owner] + (index - before) * block
        source = lax.dynamic_slice(padded_order, (start,), (block,)) // top_k
        y = expert(z[source], params, owner, betas)
        # A short unit writes past its rows; the units after it, in order, write over that.
        return lax.dynamic_update_slice(sorted_rows, y, (start, 0))

    padded_order = jnp.concatenate([order, jnp.zeros(block, order.dtype)])
    empty = zeros_varying((num_rows + block, z.shape[1]), jnp.bfloat16, z, ids, some_weights)
    sorted_rows = lax.fori_loop(0, first_unit[-1], unit, empty)

    position = jnp.zeros_like(order).at[order].set(jnp.arange(num_rows, dtype=order.dtype))
    routed = jnp.where((flat < num_experts)[:, None], sorted_rows[position], 0)
    return routed.reshape(num_tokens, top_k, -1)


def _segments(sorted_ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Where each expert's run starts in the sorted ids, and how long it is."""
    edges = jnp.searchsorted(sorted_ids, jnp.arange(num_experts + 1, dtype=sorted_ids.dtype))
    return edges[:-1], jnp.diff(edges)
