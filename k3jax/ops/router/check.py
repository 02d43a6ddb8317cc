"""The router's kernels against its reference, on the current device."""

import functools

import jax
import jax.numpy as jnp

from k3jax.config import MoEConfig
from k3jax.ops.check import CheckResult, microseconds
from k3jax.ops.router.api import RouterTier, route
from k3jax.params import GateParams
from k3jax.runtime.target import Target

_NUM_TOKENS = 16
_LIMIT = 2e-5


def check_kernels(target: Target) -> CheckResult:
    """Largest deviation of a weight; infinite if an id differs from the reference's.

    The inputs are small whole numbers, so logits are exact in any order of summation, and
    ties are common.
    """
    config = MoEConfig.kimi_k3()
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.randint(keys[0], (_NUM_TOKENS, config.hidden_size), -1, 2)
    weight = jax.random.randint(keys[1], (config.num_experts, config.hidden_size), -1, 2) / 64
    bias = jax.random.normal(keys[2], (config.num_experts,)) / 64
    args = x.astype(jnp.bfloat16), GateParams(weight.astype(jnp.bfloat16), bias)
    tier = {
        name: functools.partial(route, config=config, tier=name, target=target)
        for name in RouterTier
    }
    ids, weights = jax.jit(tier[RouterTier.KERNEL])(*args)
    want_ids, want_weights = jax.jit(tier[RouterTier.XLA])(*args)
    same = jnp.all(ids == want_ids)
    error = jnp.where(same, jnp.max(jnp.abs(weights - want_weights)), jnp.inf)
    return CheckResult(float(error), _LIMIT, microseconds(tier[RouterTier.KERNEL], *args))
