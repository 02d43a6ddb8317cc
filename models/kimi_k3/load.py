"""Decoder layers from a Kimi K3 checkpoint."""

from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from k3jax import MoEConfig, Parallel, load_layer, prepare_params
from k3jax.checkpoint import Checkpoint
from models.kimi_k3.model import LayerParams

NORM = "language_model.model.layers.{layer}.post_attention_layernorm.weight"


def load_layers(
    path: str | Path,
    layers: Iterable[int],
    config: MoEConfig,
    parallel: Parallel | None = None,
    *,
    progress: bool = True,
) -> dict[int, LayerParams]:
    """The layers, keyed by their index; each device reads only its own part of the experts.

    A checkpoint without `post_attention_layernorm`, such as a synthetic one, gets gains of 1.

    Args:
        path: folder with safetensors shards, or one shard.
        layers: indices of MoE decoder layers.
        config: the MoE block.
        parallel: mesh and axis for tensor parallelism.
        progress: whether to draw a progress bar for each layer.

    Raises:
        FileNotFoundError: there is no checkpoint at `path`.
        ValueError: a layer has no MoE, or a tensor is missing or does not fit.
    """
    with Checkpoint(path) as checkpoint:
        return {
            layer: LayerParams(
                _load_norm(checkpoint, layer, config, parallel),
                prepare_params(
                    load_layer(checkpoint, layer, config, parallel, progress=progress),
                    config,
                    parallel,
                ),
            )
            for layer in layers
        }


def _load_norm(
    checkpoint: Checkpoint, layer: int, config: MoEConfig, parallel: Parallel | None
) -> jax.Array:
    name, shape = NORM.format(layer=layer), (config.hidden_size,)
    gain = np.ones(shape, jnp.bfloat16)
    stored = checkpoint.tensors(name).get("")
    if stored is not None:
        if stored.type != ("BF16", shape):
            raise ValueError(f"{name} is {stored.type}, want BF16 {list(shape)}")
        checkpoint.read_into(gain, stored, (slice(0, *shape),))
    if parallel is None:
        return jnp.asarray(gain)
    return jax.make_array_from_callback(shape, parallel.sharding(P()), gain.__getitem__)
