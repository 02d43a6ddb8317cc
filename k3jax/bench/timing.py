"""How long a run of queued device work takes, without what it costs to dispatch it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

FEW, MANY, PAIRS = 2, 6, 5
SLOW = 0.02
"""Seconds of a run next to which its dispatch is nothing."""


def device_seconds(start: Callable[[], Any], wait: Callable[[Any], Any] | None = None) -> float:
    """Seconds that the device needs for one run, where runs follow one another without a gap.

    Many runs in a row take longer than few by what the device needs for the additional ones, as
    long as it needs more for a run than the host for dispatching it: make a run of many calls. The
    median of several such differences, after warming up. Of a slow run, one is enough.

    Args:
        start: dispatches one run and returns its outputs, without waiting.
        wait: returns once these outputs exist; `jax.block_until_ready` if None.
    """
    wait = wait or jax.block_until_ready

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        outputs = None
        for _ in range(count):
            del outputs  # the next run gets the same memory, so a captured graph fits as it is
            outputs = start()
        wait(outputs)
        return time.perf_counter() - begin

    seconds(1)
    if (one := seconds(1)) > SLOW:
        return one
    seconds(MANY)
    extra = [seconds(MANY) - seconds(FEW) for _ in range(PAIRS)]
    return statistics.median(extra) / (MANY - FEW)
