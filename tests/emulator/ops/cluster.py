"""Clusters and dependent launches: `mapa`, `getctarank`, `griddepcontrol`."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..memory import SharedMemory
from .data import SHARED_WINDOW
from .mbarrier import lanes
from .memory import take_space


@instruction("mapa")
def mapa(b: Binder) -> Op:
    """The address of the same variable in another block of the cluster."""
    generic = take_space(b) == "generic"
    kind = b.type("u32", "u64")
    d, a, rank = b.operands
    raw = kind.raw.type
    within = raw((1 << SharedMemory.RANK_SHIFT) - 1)

    def fn(address, block):
        mapped = (address & within) | (block.astype(kind.raw) << raw(SharedMemory.RANK_SHIFT))
        return mapped | raw(SHARED_WINDOW) if generic else mapped

    srcs = [b.src(a, kind.bits), b.src(rank, 32)]
    return b.pure(fn, [b.dst(d, kind.bits)], srcs)


@instruction("getctarank")
def getctarank(b: Binder) -> Op:
    """The rank of the block that a shared address belongs to."""
    take_space(b)
    kind = b.type("u32", "u64")
    d, a = b.operands

    def fn(address):
        rank = (address >> kind.raw.type(SharedMemory.RANK_SHIFT)) & kind.raw.type(0xFF)
        return rank.astype(np.uint32)

    return b.pure(fn, [b.dst(d, 32)], [b.src(a, kind.bits)])


@instruction("griddepcontrol")
def griddepcontrol(b: Binder) -> Op:
    """Programmatic dependent launch: let the next launch start; wait for the one before."""
    if b.one_of("wait", "launch_dependents") == "launch_dependents":

        def trigger(G, mask):
            G.grid.device.trigger(G.grid, np.unique(lanes(G, mask)[0]))

        return b.effect(trigger, [], [])
    if b.ins.guard is not None:
        raise b.unknown("a guarded griddepcontrol.wait is not implemented; branch around it")

    def wait(R, G):
        done = G.grid.device.previous_done(G.grid, np.unique(lanes(G, G.mask)[0]))
        return None if done else np.zeros((G.count, 1), bool)

    return b.op(
        wait, effect=True, waits=True, describe=lambda grid, row, value: "the previous launch"
    )
