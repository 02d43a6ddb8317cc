"""`bar`, `barrier` and `barrier.cluster`."""

import numpy as np

from ..barriers import ClusterBarrier, NamedBarriers
from ..binding import Binder, Op, instruction


def _per_warp(G, mask, values) -> np.ndarray:
    """One value per warp of a value that must be the same in all its active lanes."""
    wide = G.wide(values)
    if mask is None:
        return wide[:, 0].astype(np.int64)
    return np.where(mask, wide, 0).max(axis=1).astype(np.int64)


@instruction("bar", "barrier")
def bar(b: Binder) -> Op:
    """Block barriers and the cluster barrier."""
    if b.flag("cluster"):
        return _cluster(b)
    if b.flag("warp"):
        from .warp import warp_barrier

        return warp_barrier(b)
    b.flag("cta")
    action = b.one_of("sync", "arrive")
    b.flag("aligned")
    number = b.src(b.operands[0], 32)
    threads = b.src(b.operands[1], 32) if len(b.operands) > 1 else None
    ticket = b.slots.hidden(32, "barrier")
    srcs = [number] if threads is None else [number, threads]

    def arrive(G, mask, which, count=None):
        state = G.grid.part(NamedBarriers)
        counts = None if count is None else _per_warp(G, mask, count)
        return (state.arrive(G, mask, _per_warp(G, mask, which), counts, b.ins),)

    if action == "arrive":
        if threads is None:
            raise b.unknown("bar.arrive needs a thread count")
        return b.effect(arrive, [ticket], srcs, sync="all")
    b.defs.append(ticket)
    first = b.effect(arrive, [ticket], srcs, sync="all")

    def wait(R, G):
        which = _per_warp(G, G.mask, R[number])
        return G.grid.part(NamedBarriers).passed(G, G.mask, which, R[ticket][:, :1].max(
            axis=1, keepdims=True))  # fmt: skip

    def describe(grid, row, value):
        state = grid.part(NamedBarriers)
        at = (grid.block_of[row], value(number))
        there = np.flatnonzero(state.present[at]).tolist()
        return (
            f"barrier {at[1]}: {state.arrived[at]} of {state.expected[at]} threads arrived "
            f"(warps {there})"
        )

    if b.ins.guard is not None:
        raise b.unknown("a guarded barrier is not implemented; branch around it")
    return Op(b.ins, wait, (number, ticket), (), effect=True, waits=True, describe=describe,
              before=[first])  # fmt: skip


def _cluster(b: Binder) -> Op:
    action = b.one_of("arrive", "wait")
    b.one_of("release", "relaxed", "acquire", default="")
    b.flag("aligned")
    if action == "arrive":

        def arrive(G, mask):
            G.grid.part(ClusterBarrier).arrive(G, mask, b.ins)

        return b.effect(arrive, [], [], sync="all")
    if b.ins.guard is not None:
        raise b.unknown("a guarded barrier is not implemented; branch around it")

    def wait(R, G):
        return G.grid.part(ClusterBarrier).passed(G, G.mask, b.ins)

    def describe(grid, row, value):
        state = grid.part(ClusterBarrier)
        cluster = grid.block_of[row] // grid.cluster_size
        return f"the cluster barrier: {state.arrived[cluster]} of {state.expected} warps arrived"

    return b.op(wait, effect=True, waits=True, sync="all", describe=describe)
