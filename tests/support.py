"""What several test files share: configs, token counts, meshes, and parameters for the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from k3jax.config import MoEConfig
from k3jax.parallel import Parallel
from k3jax.params import MoEParams, init_params, iter_infos, param_specs

TOKENS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Around every tile edge that an implementation may have."""

TINY = MoEConfig.tiny()
ROUTED_LIKE_K3 = MoEConfig(
    hidden_size=64,
    latent_size=32,
    num_experts=896,
    experts_per_token=16,
    expert_intermediate_size=64,
    num_shared_experts=1,
)
"""All of K3's experts and choices, at a width that costs nothing."""
SMALL = MoEConfig(
    hidden_size=64,
    latent_size=32,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=256,
    num_shared_experts=1,
)
"""For tests of what is around the numbers; splits up to 8 ways."""

WHOLE_LAYER = 6e-3
"""Relative L2 error allowed between a W4A16 layer and the unrounded float64 layer.

Rounding to bfloat16 at the points of the specification alone gives 3e-3 to 5e-3.
"""

ONE_OP = 3e-3
"""Relative L2 error allowed for one op whose output is rounded once to bfloat16.

Half a bfloat16 ulp is at most 2^-9 = 2e-3 of a value; a flipped rounding inside adds a little.
"""

GRADIENT = 2e-2
"""Relative L2 error allowed between gradients by two orders of the same bfloat16 operations.

The backward pass rounds to bfloat16 after every operation and sums over ranks in that dtype.
"""


@functools.cache
def params_of(config: MoEConfig, seed: int = 0) -> MoEParams:
    return jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))


def numpy_params(params: MoEParams, config: MoEConfig) -> dict[str, np.ndarray]:
    """The oracle's view: checkpoint tensor names, experts stacked."""
    arrays = {}
    for info, array in zip(iter_infos(config), jax.tree.leaves(params), strict=True):
        name = info.name.replace(".packed", ".weight_packed").replace(".scale", ".weight_scale")
        if not name.startswith(("experts.", "gate.")):
            name += ".weight"
        arrays[name] = np.asarray(array)
    return arrays


@functools.cache
def parallel_of(tp: int, axis: str = "tp", kind: AxisType = AxisType.Auto) -> Parallel:
    mesh = jax.make_mesh((tp,), (axis,), axis_types=(kind,), devices=jax.devices()[:tp])
    return Parallel(mesh, axis)


@functools.cache
def data_and_tensor_parallel(kind: AxisType = AxisType.Auto) -> Parallel:
    """Tokens split two ways over "data", weights four ways over "model"."""
    devices = jax.devices()[:8]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind), devices=devices)
    return Parallel(mesh, "model", ("data",))


@functools.cache
def sharded_params(config: MoEConfig, parallel: Parallel, seed: int = 0) -> MoEParams:
    specs = param_specs(config, parallel.axis)
    return jax.tree.map(
        lambda array, spec: jax.device_put(array, parallel.sharding(spec)),
        params_of(config, seed),
        specs,
    )


def tokens_of(num_tokens: int, width: int, seed: int = 0) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed + 1), num_tokens)
    return jax.random.normal(key, (num_tokens, width)).astype(jnp.bfloat16)


def bits(array) -> np.ndarray:
    """The array's bytes, so that NaN equals NaN and -0 differs from 0."""
    array = np.asarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
