"""What layers on a card are held to: many batches through the layer without rounding, at once."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.float32 import COMPILER_OPTIONS, float32_layer
from tests.support import params_of, tokens_of


@functools.cache
def wanted(
    config: MoEConfig, counts: Sequence[int], seed: int = 0
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each token count, tokens of its own and the float32 layer of them.

    One batch holds them all, because a token's result does not depend on the others and one program
    compiles faster than one for each count.
    """
    x = tokens_of(sum(counts), config.hidden_size, seed)
    layer = jax.jit(float32_layer, static_argnums=2, compiler_options=COMPILER_OPTIONS)
    y = layer(params_of(config), x, config)
    ends = np.cumsum(counts)[:-1]
    parts = zip(np.split(np.asarray(x), ends), np.split(np.asarray(y), ends), strict=True)
    return dict(zip(counts, parts, strict=True))
