"""How fast the current device reads its memory, for floors on cards that have no number yet."""

import statistics
import time

import jax
import jax.numpy as jnp

_SHORT, _LONG, _PAIRS = 2, 10, 5


def measure_read_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes per second of summing an array much larger than the caches.

    The time of a sum is the difference between a long and a short run of them over the difference
    in number, which leaves out what a dispatch costs; the median of several such pairs.
    """
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)

    @jax.jit
    def read(words, seed):
        return jnp.sum(words ^ seed)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([read(words, jnp.uint32(seed)) for seed in range(count)])
        return time.perf_counter() - start

    seconds(_LONG)
    pairs = [(seconds(_LONG) - seconds(_SHORT)) / (_LONG - _SHORT) for _ in range(_PAIRS)]
    return num_bytes / statistics.median(pairs)
