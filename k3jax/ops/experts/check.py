"""The expert kernels against their reference, on the current device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import MXFP4_GROUP_SIZE, MoEConfig
from k3jax.ops.check import CheckResult, microseconds
from k3jax.ops.experts import grouped
from k3jax.ops.experts.api import ExpertsTier, routed_experts
from k3jax.ops.experts.packing import PackedExperts, pack_experts
from k3jax.params import ExpertParams
from k3jax.quant.mxfp4 import Mxfp4Array
from k3jax.runtime.target import Target

_NUM_TOKENS, _TP = 8, 8
_LIMIT = 3e-3
"""Both round at the same points; another order of sums flips some of the roundings."""


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_experts(config: MoEConfig, tp: int, key: jax.Array) -> ExpertParams:
    """One rank's share of random experts: every code, scales that keep activations near 1."""
    E, L = config.num_experts, config.latent_size
    inner = config.expert_intermediate_size // tp
    shapes = (inner, L), (inner, L), (L, inner)
    sizes = [
        rows * columns // values for rows, columns in shapes for values in (2, MXFP4_GROUP_SIZE)
    ]
    # One draw for all of them: each shape that is drawn is one more program to compile.
    drawn = jax.random.bits(key, (E, sum(sizes)), jnp.uint8)
    parts = jnp.split(drawn, np.cumsum(sizes)[:-1], axis=1)
    return ExpertParams(
        *(
            Mxfp4Array(codes.reshape(E, rows, -1), (119 + scales % 3).reshape(E, rows, -1))
            for (rows, _), codes, scales in zip(shapes, parts[::2], parts[1::2], strict=True)
        )
    )


def check_kernels(target: Target) -> CheckResult:
    """Largest relative L2 error of the kernels' tiers: K3's widths, 16 experts, one rank of 8.

    The decode tier also runs a single token, for which it has other kernels. The time is that of
    the decode tier.
    """
    config = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=16, experts_per_token=4)
    keys = jax.random.split(jax.random.key(0), 4)
    experts = random_experts(config, _TP, keys[0])
    z = jax.random.normal(keys[1], (_NUM_TOKENS, config.latent_size)).astype(jnp.bfloat16)
    order = jax.random.uniform(keys[2], (_NUM_TOKENS, config.num_experts))
    ids = jnp.argsort(order, axis=1)[:, : config.experts_per_token].astype(jnp.int32)
    weights = jax.random.uniform(keys[3], ids.shape)

    args = z, ids.at[0, 0].set(-1), weights
    packed = jax.jit(pack_experts)(experts)

    def run(tier: ExpertsTier, experts: ExpertParams | PackedExperts, tokens: int) -> jax.Array:
        call = functools.partial(routed_experts, config=config, tier=tier, tp=_TP, target=target)
        some = (array[:tokens] for array in args)
        return jax.jit(call)(*some, experts).astype(jnp.float32)

    cases = [(ExpertsTier.DECODE, 1), (ExpertsTier.DECODE, _NUM_TOKENS)]
    if grouped.refusal(config, _NUM_TOKENS, _TP, target) is None:
        cases.append((ExpertsTier.GROUPED, _NUM_TOKENS))
    reference = run(ExpertsTier.REFERENCE, experts, _NUM_TOKENS)
    errors = []
    for tier, tokens in cases:
        want = reference[:tokens]
        got = run(tier, packed, tokens)
        errors.append(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    decode = functools.partial(
        routed_experts, config=config, tier=ExpertsTier.DECODE, tp=_TP, target=target
    )
    worst = float(jnp.max(jnp.stack(errors)))
    return CheckResult(worst, _LIMIT, microseconds(decode, *args, packed))
