"""Checking an op's kernels against its reference on the device at hand.

Used by `k3jax doctor`, and by `plan_layer` where a kernel has only been compiled so far: its first
use in a process runs the check, and a mismatch makes the plan fall back, with a warning.
"""

import functools
import importlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from k3jax.runtime.target import Target

logger = logging.getLogger("k3jax")

CHECKED_OPS = ("router", "experts")
"""Ops with a module `check` whose `check_kernels(target)` returns a `CheckResult`."""

PROVEN = frozenset({("router", "sm_90a"), ("experts", "sm_90a")})
"""(op, architecture) whose kernels ran on a card and gave the right numbers; see docs/status.md."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        error: deviation from the reference, in the op's own measure.
        limit: most that is right.
        microseconds: of one call, back to back with others.
    """

    error: float
    limit: float
    microseconds: float

    @property
    def passed(self) -> bool:
        """Whether the numbers are right; NaN is not."""
        return self.error <= self.limit


def run_check(op: str, target: Target) -> CheckResult:
    """Runs the check of one op on the current device.

    It runs in a thread of its own, because a plan is made while JAX traces.
    """
    check = importlib.import_module(f"k3jax.ops.{op}.check").check_kernels
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(check, target).result()


@functools.cache
def distrust(op: str, target: Target) -> str | None:
    """Why the kernels of `op` should not be used on this device; None if they should.

    Proven architectures and devices that are not here are trusted; anything else is checked.
    """
    if target.arch is None or (op, target.arch) in PROVEN or Target.current() != target:
        return None
    try:
        result = run_check(op, target)
    except Exception as error:
        reason = f"its first use on {target.arch} failed: {error}"
    else:
        if result.passed:
            logger.info("%s kernels checked on %s: error %.1e", op, target.arch, result.error)
            return None
        reason = f"wrong on {target.arch}: error {result.error:.1e}, limit {result.limit:.1e}"
    logger.warning("%s kernels are not used: %s; run `k3jax doctor`", op, reason)
    return reason


def microseconds(function: Callable[..., Any], *args: Any, repeats: int = 20) -> float:
    """Time of one call among `repeats` calls that are dispatched together."""
    chain = jax.jit(lambda *args: [function(*args) for _ in range(repeats)])
    jax.block_until_ready(chain(*args))
    start = time.perf_counter()
    jax.block_until_ready(chain(*args))
    return 1e6 * (time.perf_counter() - start) / repeats
