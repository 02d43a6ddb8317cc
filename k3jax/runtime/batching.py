"""`jax.vmap` over functions whose first axis is tokens: the mapped axis becomes more tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def fold_vmap(function: Callable[..., Any], num_token_args: int) -> Callable[..., Any]:
    """Makes vmap over a function one call with B * T tokens.

    Right for functions that treat tokens independently, as kernels and routers do; a kernel cannot
    be given another axis any other way.

    Args:
        function: its first `num_token_args` arguments and every result are arrays [T, ...]; the
            other arguments, weights, are pytrees that no vmap may map over.
        num_token_args: how many arguments carry tokens.
    """
    folding = custom_vmap(function)

    @folding.def_vmap
    def fold(axis_size: int, in_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        _refuse_mapped_weights(function, in_batched[num_token_args:])
        flat = [
            _merge(x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)))
            for x, batched in zip(args[:num_token_args], in_batched, strict=False)
        ]
        results = folding(*flat, *args[num_token_args:])
        split = jax.tree.map(lambda y: y.reshape(axis_size, -1, *y.shape[1:]), results)
        return split, jax.tree.map(lambda _: True, results)

    return functools.wraps(function)(folding)


def _merge(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _refuse_mapped_weights(function: Callable[..., Any], in_batched: list[Any]) -> None:
    if any(jax.tree.leaves(in_batched)):
        raise NotImplementedError(
            f"{getattr(function, '__name__', 'this function')}: jax.vmap maps over its weights; "
            "only tokens can be folded. Map over the tokens with in_axes=None for the weights, or "
            "call it once for each set of weights"
        )
