"""Refusing a gradient in words, where an implementation has none."""

from collections.abc import Callable
from typing import Any

import jax


def without_gradient(function: Callable[..., Any], *, name: str, remedy: str) -> Callable[..., Any]:
    """`function`, raising NotImplementedError with the remedy when differentiated.

    The last argument of `function` is static; the others are pytrees of arrays.
    """

    def wrapped(*args):
        *arrays, static = args

        @jax.custom_jvp
        def call(*operands):
            return function(*operands, static)

        @call.defjvp
        def refuse(primals, tangents):
            raise NotImplementedError(f"{name} has no gradient; {remedy}")

        return call(*arrays)

    return wrapped
