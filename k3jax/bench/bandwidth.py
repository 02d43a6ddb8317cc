"""How fast the current device reads its memory, for floors on cards that have no number yet."""

import jax
import jax.numpy as jnp

from k3jax.bench.timing import device_seconds
from k3jax.runtime.target import Target


def read_bandwidth(target: Target) -> float:
    """Bytes per second that floors are computed with: what is known of a card, or measured now.

    Raises:
        NotImplementedError: the device has no kernels to time.
    """
    if target.read_bytes_per_second is not None:
        return target.read_bytes_per_second
    if target.arch is None:
        raise NotImplementedError(f"{target.kind!r} has no kernels to time: use a GPU")
    return measure_read_bandwidth()


def measure_read_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes per second of summing an array much larger than the caches."""
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    read = jax.jit(lambda words: jnp.sum(words))
    return num_bytes / device_seconds(lambda: read(words))
