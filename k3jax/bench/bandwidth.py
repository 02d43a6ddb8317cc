"""How fast the current device reads its memory, for floors on cards that have no number yet."""

import jax
import jax.numpy as jnp

from k3jax.bench.timing import device_seconds


def measure_read_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes per second of summing an array much larger than the caches."""
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    read = jax.jit(lambda words: jnp.sum(words))
    return num_bytes / device_seconds(lambda: read(words))
