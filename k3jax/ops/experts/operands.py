"""What every program of the experts takes, in this order."""

import jax.numpy as jnp
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.experts.packing import packed_shapes
from k3jax.runtime.program import ArraySpec


def program_operands(config: MoEConfig, num_tokens: int, tp: int) -> tuple[ArraySpec, ...]:
    """z bfloat16 [T, L], ids int32 [T, K], weights float32 [T, K], gate_up and down of one rank."""
    inner = config.expert_intermediate_size // tp
    routes = (num_tokens, config.experts_per_token)
    shapes = packed_shapes(config.num_experts, config.latent_size, inner)
    return (
        ArraySpec((num_tokens, config.latent_size), np.dtype(jnp.bfloat16)),
        ArraySpec(routes, np.dtype(np.int32)),
        ArraySpec(routes, np.dtype(np.float32)),
        ArraySpec(shapes["gate_up"], np.dtype(np.uint8)),
        ArraySpec(shapes["down"], np.dtype(np.uint8)),
    )
