"""State of named barriers, cluster barriers and mbarriers of one launch."""

import numpy as np

from .errors import BarrierError, RaceError
from .memory import ALLOCATED, WRITE


class NamedBarriers:
    """The 16 barriers of every block."""

    COUNT = 16

    def __init__(self, grid):
        shape = (grid.num_blocks, self.COUNT)
        self.grid = grid
        self.arrived = np.zeros(shape, np.int64)
        self.expected = np.zeros(shape, np.int64)
        self.phase = np.zeros(shape, np.uint32)
        self.clocks = np.zeros((*shape, grid.races.width), np.int32)
        self.done_clocks = np.zeros_like(self.clocks)
        self.present = np.zeros((*shape, grid.warps_per_block), bool)

    def arrive(self, G, mask, barrier, threads, ins) -> np.ndarray:
        """Counts the warps in; returns the phase each has to wait for, [warps, 1].

        Args:
            barrier, threads: per warp; threads is None for the whole block.
        """
        grid, numbers = self.grid, G.numbers
        if mask is not None:
            keep = mask.any(axis=1)
            numbers, barrier = numbers[keep], barrier[keep]
            threads = None if threads is None else threads[keep]
        if (barrier >= self.COUNT).any():
            raise BarrierError(f"barrier {int(barrier.max())} of {self.COUNT}", ins)
        block, warp = grid.block_of[numbers], grid.warp_in_block[numbers]
        at = (block, barrier)
        wanted = grid.warps_per_block * 32 if threads is None else threads
        if ((self.arrived[at] > 0) & (self.expected[at] != wanted)).any():
            raise BarrierError("warps give one barrier different thread counts", ins)
        if self.present[(*at, warp)].any():
            raise BarrierError("a warp arrives twice at a barrier in one phase", ins)
        self.expected[at] = wanted
        self.present[(*at, warp)] = True
        np.add.at(self.arrived, at, 32)
        np.maximum.at(self.clocks, at, grid.races.release(numbers))
        ticket = np.zeros((G.count, 1), np.uint32)
        ticket[np.isin(G.numbers, numbers), 0] = self.phase[at] + 1
        self._complete(at, ins)
        grid.device.progress += 1
        return ticket

    def _complete(self, at, ins) -> None:
        if (self.arrived[at] > self.expected[at]).any():
            raise BarrierError("more threads arrive at a barrier than it expects", ins)
        full = self.arrived[at] == self.expected[at]
        if full.any():
            done = np.unique(np.stack(at)[:, full], axis=1)
            done = tuple(done)
            self.phase[done] += 1
            self.arrived[done] = 0
            self.present[done] = False
            self.done_clocks[done] = self.clocks[done]
            self.clocks[done] = 0

    def passed(self, G, mask, barrier, ticket) -> np.ndarray:
        """Which warps may go on, [warps, 1]."""
        at = (self.grid.block_of[G.numbers], barrier)
        ready = self.phase[at][:, None] >= ticket
        rows = ready[:, 0] if mask is None else ready[:, 0] & mask.any(axis=1)
        if rows.any():
            clocks = self.done_clocks[at][rows]
            self.grid.races.acquire(G.numbers[rows], clocks)
        return ready

    def blocks_exited(self, blocks) -> None:
        """A block must not leave others' arrivals behind; nothing outlives a block here."""


class ClusterBarrier:
    """The hardware barrier of every cluster: each thread of it arrives, then waits."""

    def __init__(self, grid):
        count = -(-grid.num_blocks // grid.cluster_size)
        self.grid = grid
        self.expected = grid.cluster_size * grid.warps_per_block
        self.arrived = np.zeros(count, np.int64)
        self.phase = np.zeros(count, np.uint32)
        self.clocks = np.zeros((count, grid.races.width), np.int32)
        self.done_clocks = np.zeros_like(self.clocks)
        self.ticket = np.zeros(grid.num_warps, np.uint32)
        self.waiting = np.zeros(grid.num_warps, bool)

    def arrive(self, G, mask, ins) -> None:
        """Counts the warps in."""
        numbers = G.numbers if mask is None else G.numbers[mask.any(axis=1)]
        if self.waiting[numbers].any():
            raise BarrierError("a warp arrives twice at the cluster barrier without waiting", ins)
        cluster = self.grid.block_of[numbers] // self.grid.cluster_size
        self.waiting[numbers] = True
        self.ticket[numbers] = self.phase[cluster] + 1
        np.add.at(self.arrived, cluster, 1)
        np.maximum.at(self.clocks, cluster, self.grid.races.release(numbers))
        for done in np.unique(cluster[self.arrived[cluster] == self.expected]):
            self.phase[done] += 1
            self.arrived[done] = 0
            self.done_clocks[done] = self.clocks[done]
            self.clocks[done] = 0
        self.grid.device.progress += 1

    def passed(self, G, mask, ins) -> np.ndarray:
        """Which warps may go on, [warps, 1]."""
        numbers = G.numbers if mask is None else G.numbers[mask.any(axis=1)]
        if not self.waiting[numbers].all():
            raise BarrierError("a warp waits at the cluster barrier without arriving", ins)
        cluster = self.grid.block_of[G.numbers] // self.grid.cluster_size
        ready = self.phase[cluster] >= self.ticket[G.numbers]
        free = G.numbers[ready] if mask is None else G.numbers[ready & mask.any(axis=1)]
        self.waiting[free] = False
        self.grid.races.acquire(free, self.done_clocks[self.grid.block_of[free] //
                                                       self.grid.cluster_size])  # fmt: skip
        return ready[:, None]

    def blocks_exited(self, blocks) -> None:
        """Nothing to check: an arrival without a wait before exit is legal."""


class Mbarriers:
    """Every mbarrier object, indexed by shared-memory offset / 8."""

    def __init__(self, grid):
        count = grid.shared.data.size // 8
        self.grid = grid
        self.valid = np.zeros(count, bool)
        self.initialiser = np.zeros(count, np.int32)
        self.initial_epoch = np.zeros(count, np.int32)
        self.expected = np.zeros(count, np.int64)
        self.pending = np.zeros(count, np.int64)
        self.bytes = np.zeros(count, np.int64)
        self.phase = np.zeros(count, np.int64)
        self.clocks = np.zeros((count, grid.races.width), np.int32)
        self.done_clocks = np.zeros((count, grid.races.width), np.int32)

    def find(self, offset, numbers, ins) -> np.ndarray:
        """Indices of the mbarriers at some offsets, as some warps use them.

        Each must have been initialised, and something must order that before the use.
        """
        index = (offset >> np.uint64(3)).astype(np.int64)
        misplaced = (offset & np.uint64(7)).astype(bool) | (index >= self.valid.size)
        if misplaced.any() or not self.valid[np.where(misplaced, 0, index)].all():
            bad = offset[misplaced | ~self.valid[np.where(misplaced, 0, index)]]
            raise BarrierError(f"no mbarrier at {self.grid.shared.spell(int(bad[0]))}", ins)
        known = self.grid.races.clock[numbers, self.initialiser[index]]
        if (known < self.initial_epoch[index]).any():
            where = self.grid.shared.spell(
                int(index[(known < self.initial_epoch[index]).argmax()]) * 8
            )
            raise RaceError(
                f"nothing orders the use of the mbarrier at {where} after its init", ins
            )
        return index

    def init(self, offset, count, numbers, ins) -> None:
        """`mbarrier.init` by some lanes."""
        index = (offset >> np.uint64(3)).astype(np.int64)
        if (offset & np.uint64(7)).any() or (index >= self.valid.size).any():
            raise BarrierError("an mbarrier must be 8-byte aligned in shared memory", ins)
        shadow = self.grid.shared.shadow.reshape(-1, 8)
        if not (shadow[index] & ALLOCATED).all():
            raise BarrierError("an mbarrier outside the block's shared memory", ins)
        if self.valid[index].any():
            raise BarrierError("mbarrier.init of a live mbarrier; mbarrier.inval comes first", ins)
        if (count < 1).any() or (count >= 1 << 20).any():
            raise BarrierError("an mbarrier counts 1 to 2^20 - 1 arrivals", ins)
        shadow[index] = ALLOCATED
        self.valid[index] = True
        self.expected[index] = self.pending[index] = count
        self.bytes[index] = self.phase[index] = 0
        self.clocks[index] = 0
        self.done_clocks[index] = 0
        self.initialiser[index] = self.grid.races.local[numbers]
        self.initial_epoch[index] = self.grid.races.clock[numbers, self.grid.races.local[numbers]]
        self.grid.device.progress += 1

    def invalidate(self, offset, numbers, ins) -> None:
        """`mbarrier.inval`: the memory may be used for other things."""
        index = self.find(offset, numbers, ins)
        self.valid[index] = False
        self.grid.shared.shadow.reshape(-1, 8)[index] = ALLOCATED | WRITE

    def arrive(self, index, count, expect, who, ins) -> np.ndarray:
        """Arrivals of `count` and expected bytes by lanes; returns the phases before.

        Args:
            index: mbarrier of each lane.
            count, expect: arrivals and bytes of each lane.
            who: warp and lane numbers of those that release what they did, or None.
            ins: the instruction.
        """
        before = self.phase[index].copy()
        np.add.at(self.bytes, index, expect)
        np.subtract.at(self.pending, index, count)
        if who is not None:
            np.maximum.at(self.clocks, index, self.grid.races.release_lanes(*who))
        self._complete(index, ins)
        return before

    def complete_bytes(self, index: int, num_bytes: int, clocks: np.ndarray) -> None:
        """A copy reports bytes that arrived."""
        self.bytes[index] -= num_bytes
        self.clocks[index] = np.maximum(self.clocks[index], clocks)
        self._complete(np.array([index]), None)

    def _complete(self, index, ins) -> None:
        self.grid.device.progress += 1
        if (self.pending[index] < 0).any():
            where = int(index[(self.pending[index] < 0).argmax()]) * 8
            raise BarrierError(
                f"more arrivals than the {int(self.expected[where // 8])} that the mbarrier at "
                f"{self.grid.shared.spell(where)} expects",
                ins,
            )
        done = np.unique(index[(self.pending[index] == 0) & (self.bytes[index] == 0)])
        self.phase[done] += 1
        self.pending[done] = self.expected[done]
        self.done_clocks[done] = np.maximum(self.done_clocks[done], self.clocks[done])
        self.clocks[done] = 0

    def acquire(self, numbers, index) -> None:
        """Lanes of some warps saw a phase completed."""
        clocks = self.done_clocks[index]
        np.maximum.at(self.grid.races.clock, numbers, clocks)

    def describe(self, offset: int) -> str:
        """State of one mbarrier, for the report of a hang."""
        index = offset // 8
        where = self.grid.shared.spell(offset)
        if not self.valid[index]:
            return f"{where}, which holds no mbarrier"
        return (
            f"the mbarrier at {where}: phase {self.phase[index]} lacks {self.pending[index]} of "
            f"{self.expected[index]} arrivals and {self.bytes[index]} bytes"
        )

    def blocks_exited(self, blocks) -> None:
        """Copies that would still complete on a gone block's mbarrier are checked by copies."""
