"""Decoder layers around the MoE: norm, residual, and a place for attention.

    x = x + attention(layer, x)                            if there is one
    x = x + moe(RMSNorm(x) * post_attention_layernorm)

Everything is a function of parameters that are plain pytrees, so jit, scan, checkpoint and grad
work as usual.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax import LayerPlan, MoEConfig, MoEParams, Parallel, init_params, moe_layer, param_specs
from k3jax.ops.tail import reference as tail

type Attention = Callable[[int | jax.Array, jax.Array], jax.Array]
"""attention(layer, x): what is added to x [..., H] before the MoE, its own norm included."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer.

    Attributes:
        post_attention_layernorm: bfloat16 [H].
        moe: the MoE block.
    """

    post_attention_layernorm: Any
    moe: MoEParams


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * gain over the last axis: float32 inside, rounded once."""
    return tail.rms_norm(x.reshape(-1, x.shape[-1]), gain, eps).reshape(x.shape)


def decoder_layer(
    params: LayerParams,
    x: jax.Array,
    layer: int | jax.Array,
    *,
    config: MoEConfig,
    parallel: Parallel | None = None,
    attention: Attention | None = None,
    plan: LayerPlan | None = None,
) -> jax.Array:
    """One layer.

    Args:
        params: of this layer.
        x: bfloat16 [..., H], the residual stream.
        layer: index, for `attention` alone; traced inside `scan_layers`.
        config: the MoE block.
        parallel: mesh and axis for tensor parallelism.
        attention: the attention branch; None leaves it out.
        plan: tiers of the MoE block, chosen from the shapes if None.

    Returns:
        bfloat16, the shape of x.
    """
    if attention is not None:
        x = x + attention(layer, x)
    normed = rms_norm(x, params.post_attention_layernorm, config.rms_norm_eps)
    return x + moe_layer(params.moe, normed, config=config, parallel=parallel, plan=plan)


def run_layers(layers: Mapping[int, LayerParams], x: jax.Array, **options) -> jax.Array:
    """`layers`, keyed by their index, one after another in that order.

    The program grows with the number of layers, but weights stay where they are. Options are those
    of `decoder_layer`.
    """
    for layer in sorted(layers):
        x = decoder_layer(layers[layer], x, layer, **options)
    return x


def scan_layers(stacked: LayerParams, x: jax.Array, first_layer: int = 0, **options) -> jax.Array:
    """The layers `first_layer`, `first_layer + 1`, ... of `stack_layers` as one `lax.scan`.

    The program is that of a single layer, but XLA may copy a layer's weights out of the stack in
    each step, which decoding feels; `run_layers` never does. Options are those of `decoder_layer`.
    """

    def body(x, layer_and_params):
        layer, params = layer_and_params
        return decoder_layer(params, x, layer, **options), None

    count = stacked.post_attention_layernorm.shape[0]
    return lax.scan(body, x, (first_layer + jnp.arange(count), stacked))[0]


def stack_layers(layers: Mapping[int, LayerParams]) -> LayerParams:
    """One pytree with a leading layer axis, in the order of the indices; a copy of all weights."""
    ordered = [layers[layer] for layer in sorted(layers)]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *ordered)


def init_layers(
    config: MoEConfig, layers: Iterable[int], key: jax.Array, parallel: Parallel | None = None
) -> dict[int, LayerParams]:
    """Random layers, keyed by their index, with every norm's gain at 1."""

    def draw(key: jax.Array) -> LayerParams:
        return LayerParams(jnp.ones(config.hidden_size, jnp.bfloat16), init_params(config, key))

    shardings = None
    if parallel is not None:
        specs = LayerParams(P(), param_specs(config, parallel.axis))
        shardings = jax.tree.map(parallel.sharding, specs, is_leaf=lambda node: isinstance(node, P))
    draw = jax.jit(draw, out_shardings=shardings)
    return {layer: draw(jax.random.fold_in(key, layer)) for layer in layers}
