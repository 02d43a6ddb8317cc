"""Fences, prefetches, cache policies and other instructions without a value of their own.

The emulator executes memory operations in order and at once, so a fence changes nothing it can
show, but for `fence.proxy.async`, whose absence the race detector reports.
"""

import numpy as np

from ..binding import Binder, Op, instruction
from ..instruction import Address
from .mbarrier import lanes

_FENCE = {
    "sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl", "proxy", "async",
    "async::generic", "alias", "async.global", "async.shared::cta", "global", "shared::cta",
    "shared::cluster", "mbarrier_init", "sync_restrict::shared::cta",
    "sync_restrict::shared::cluster",
}  # fmt: skip


def _nothing(b: Binder, effect: bool = True) -> Op:
    return b.op(lambda R, G: None, effect=effect)


@instruction("fence", "membar")
def fence(b: Binder) -> Op:
    """Memory fences."""
    if "proxy" in b.modifiers and ("async" in b.modifiers or "async.shared::cta" in b.modifiers):
        b.modifiers = [m for m in b.modifiers if m not in _FENCE]
        return b.effect(lambda G, mask: G.grid.races.fence_proxy(lanes(G, mask)[0]), [], [])
    b.modifiers = [m for m in b.modifiers if m not in _FENCE]
    return _nothing(b)


@instruction("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(b: Binder) -> Op:
    """Cache prefetches."""
    if b.ins.opcode == "discard":
        raise b.unknown("discard is not implemented")
    known = {"global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap",
             "param", "const"}  # fmt: skip
    b.modifiers = [m for m in b.modifiers if m not in known]
    for operand in b.operands:
        if isinstance(operand, Address):
            b.address(operand)
    return _nothing(b, effect=False)


@instruction("createpolicy")
def createpolicy(b: Binder) -> Op:
    """A cache policy: an opaque number."""
    known = {"fractional", "range", "global", "L2::evict_first", "L2::evict_last",
             "L2::evict_normal", "L2::evict_unchanged", "b64"}  # fmt: skip
    b.modifiers = [m for m in b.modifiers if m not in known]
    return b.pure(lambda: np.zeros((1, 1), np.uint64), [b.dst(b.operands[0], 64)], [])


@instruction("setmaxnreg")
def setmaxnreg(b: Binder) -> Op:
    """Register reallocation, a matter of speed here."""
    b.one_of("inc", "dec")
    for name in ("sync", "aligned"):
        b.one_of(name)
    b.type("u32")
    return b.op(lambda R, G: None, effect=True, sync="all")


@instruction("nanosleep")
def nanosleep(b: Binder) -> Op:
    """Lets others go first."""
    b.type("u32")
    b.src(b.operands[0], 32)
    return b.op(lambda R, G: None, effect=True, poll=True)


@instruction("pmevent")
def pmevent(b: Binder) -> Op:
    """Profiler events."""
    b.flag("mask")
    return _nothing(b, effect=False)
