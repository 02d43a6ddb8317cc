"""How long a run of queued device work takes, without what it costs to dispatch it.

A sample is a queue of runs, one behind another. Many runs take longer than few by what the device
needs for the additional ones, as long as it needs more for a run than the host for dispatching it:
make a run of many calls. So the few come first in either queue, are not timed, and raise the clock
of a device that has idled.

Each queue has a rest before it. Without, the work before a measurement decides its result: a card
that draws its most power lowers its clock, and keeps it low for what comes next. What is rested is
the speed of a card that is not throttled; without rests, that under sustained load.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from k3jax.cli import arguments

REST = 0.01
"""Seconds of idling before each queue."""
WARM, TIMED = 4e-3, 8e-3
"""Seconds of work in a queue that raise the clock, and that count."""
SETTLE = 0.3
"""Seconds of queues before the first that is timed: a device that idled while the host compiled
takes longer to raise its clock than one that rested, and heat needs time to build up."""
PAIRS = 5
PROBE = 4
"""Runs by which one is estimated."""
MOST_RUNS = 100
"""Most runs of either part of a queue."""
SLOW = 0.02
"""Seconds of a run next to which its dispatch is nothing."""


def device_seconds(
    start: Callable[[], Any], wait: Callable[[Any], Any] | None = None, rest: float = REST
) -> float:
    """Seconds that the device needs for one run, where runs follow one another without a gap.

    The median of several differences. Of a slow run, one is enough.

    Args:
        start: dispatches one run and returns its outputs, without waiting.
        wait: returns once these outputs exist; `jax.block_until_ready` if None.
        rest: seconds that the device idles before each queue; 0 is sustained load.
    """
    wait = wait or jax.block_until_ready

    def seconds(count: int) -> float:
        time.sleep(rest)
        begin = time.perf_counter()
        outputs = None
        for _ in range(count):
            del outputs  # the next run gets the same memory, so a captured graph fits as it is
            outputs = start()
        wait(outputs)
        return time.perf_counter() - begin

    seconds(1)  # which compiles and captures
    if (one := seconds(1)) > SLOW:
        return one
    one = seconds(PROBE) / PROBE
    few = _runs(WARM, one)
    many = few + _runs(TIMED, one)
    settled = time.perf_counter() + SETTLE
    while time.perf_counter() < settled:
        seconds(many)
    extra = [seconds(many) - seconds(few) for _ in range(PAIRS)]
    return statistics.median(extra) / (many - few)


def add_rest(parser: argparse.ArgumentParser) -> None:
    """Adds what a benchmark takes about rests."""
    parser.add_argument(
        "--rest",
        type=arguments.seconds,
        default=REST,
        help="seconds that the device idles before each sample, so that none is throttled "
        "(default: %(default)s); 0: sustained load",
    )


def _runs(wanted: float, one: float) -> int:
    """Runs of `one` second each that take the wanted seconds."""
    return min(math.ceil(wanted / one), MOST_RUNS)


def regime(rest: float) -> str:
    """What a table says of how it was timed."""
    return f"{1e3 * rest:g} ms of rest before a sample" if rest else "under sustained load"
