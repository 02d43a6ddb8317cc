"""In flight: `cp.async` per thread, bulk copies by the copy engine, `st.async` between blocks.

Until a copy is waited for, the bytes it writes can be neither read nor written, and the bytes of
shared memory that it reads cannot be written. The data move as late as the schedule allows.
"""

from dataclasses import dataclass, field

import numpy as np

from .barriers import Mbarriers
from .errors import (
    InFlightError,
    MisalignedError,
    OutOfBoundsError,
    ReadOnlyError,
)
from .memory import ALLOCATED, FLIGHT, READ, WRITE


@dataclass
class ThreadCopies:
    """The `cp.async` of one instruction: one entry a lane, as flat arrays."""

    instruction: object
    number: np.ndarray
    lane: np.ndarray
    target: np.ndarray
    source: np.ndarray
    size: int
    valid_bytes: np.ndarray
    group: np.ndarray


class AsyncCopies:
    """`cp.async` of a launch; groups are counted per thread, as PTX says."""

    def __init__(self, grid):
        self.grid = grid
        self.commits = np.zeros((grid.num_warps, 32), np.int64)
        self.pending: list[ThreadCopies] = []

    def issue(self, access, target, source, size: int, valid_bytes) -> None:
        """Starts the copies of a group's active lanes."""
        grid, mask = self.grid, access.mask
        memory = grid.device.memory
        reads = valid_bytes > 0
        if mask is not None:
            reads = reads & mask
        for amount in np.unique(valid_bytes[reads]).tolist():
            part = amount & -amount
            some = reads & (valid_bytes == amount)
            for at in range(0, amount, part):
                unit = min(part, 8)
                access.ordered_read(memory, source + np.uint64(at), part)
                memory.load(source + np.uint64(at), unit, part // unit, some, access)
        access.ordered_write(grid.shared, target, size)
        numbers = np.broadcast_to(access.group.numbers[:, None], target.shape)
        lanes = np.broadcast_to(np.arange(32), target.shape)
        active = access.group.active(mask)
        flat = [v[active] for v in (numbers, lanes, target, source, valid_bytes)]
        number, lane, target, source, valid = flat
        grid.shared.claim(target, size, access)
        group = self.commits[number, lane]
        self.pending.append(
            ThreadCopies(access.instruction, number, lane, target, source, size, valid, group)
        )

    def commit(self, numbers, lanes) -> None:
        """`cp.async.commit_group` by some lanes."""
        self.commits[numbers, lanes] += 1

    def wait(self, numbers, lanes, keep: int) -> None:
        """Completes all but the last `keep` groups of some lanes."""
        limit = np.full(self.commits.shape, -1)
        limit[numbers, lanes] = self.commits[numbers, lanes] - keep
        self._finish(limit)

    def wait_all(self, numbers, lanes) -> None:
        """Completes every copy of some lanes, committed or not."""
        limit = np.full(self.commits.shape, -1)
        limit[numbers, lanes] = np.iinfo(np.int64).max
        self._finish(limit)

    def _finish(self, limit) -> None:
        remaining = []
        for copy in self.pending:
            done = copy.group < limit[copy.number, copy.lane]
            self._deliver(copy, done)
            if not done.all():
                kept = {
                    name: getattr(copy, name)[~done]
                    for name in ("number", "lane", "target", "source", "valid_bytes", "group")
                }
                remaining.append(ThreadCopies(copy.instruction, size=copy.size, **kept))
        self.pending = remaining

    def _deliver(self, copy: ThreadCopies, done) -> None:
        if not done.any():
            return
        at = np.arange(copy.size)
        target = copy.target[done].astype(np.int64)[:, None] + at
        inside = at < copy.valid_bytes[done][:, None]
        source = np.where(inside, copy.source[done].astype(np.int64)[:, None] + at, 0)
        shared, memory = self.grid.shared, self.grid.device.memory
        shared.data[target] = np.where(inside, memory.data[source], 0)
        defined = np.where(inside, memory.shadow[source] & READ, READ)
        shared.shadow[target] = ALLOCATED | WRITE | defined
        self.grid.device.progress += 1

    def blocks_exited(self, blocks) -> None:
        """A block may not leave copies behind."""
        for copy in self.pending:
            left = np.isin(self.grid.block_of[copy.number], blocks)
            if left.any():
                raise InFlightError(
                    f"block {self.grid.block_of[copy.number[left.argmax()]]} exits while its "
                    "cp.async is in flight",
                    copy.instruction,
                )


@dataclass(eq=False)
class BulkCopy:
    """One bulk copy.

    Attributes:
        instruction: what issued it.
        number, lane: the thread that issued it.
        kind: "load" (into shared memory), "store" (from shared to global memory).
        source, target: (memory, offset).
        size: bytes.
        barrier: index of the mbarrier that it completes on, for loads.
        epoch: its write on the copy engine's clock, for loads.
        data, defined: the bytes and which of them were ever written, once read.
    """

    instruction: object
    number: int
    lane: int
    kind: str
    source: tuple
    target: tuple
    size: int
    barrier: int = -1
    epoch: int = 0
    data: np.ndarray | None = None
    defined: np.ndarray | None = None
    done: bool = False


@dataclass
class BulkGroups:
    """Bulk groups of one thread: the open one and those committed."""

    open: list[BulkCopy] = field(default_factory=list)
    committed: list[list[BulkCopy]] = field(default_factory=list)


class BulkCopies:
    """Bulk copies of a launch."""

    ALIGNMENT = 16

    def __init__(self, grid):
        self.grid = grid
        self.pending: set[BulkCopy] = set()
        self.groups: dict[tuple[int, int], BulkGroups] = {}

    def load(self, access, number: int, lane: int, source, target: int, size: int, barrier: int):
        """Starts a copy from global (or another block's shared) memory into shared memory."""
        grid = self.grid
        copy = BulkCopy(access.instruction, number, lane, "load", source,
                        (grid.shared, target), size, barrier)  # fmt: skip
        self._check(copy)
        if source[0] is grid.device.memory and grid.device.order is not None:
            grid.device.order.check_range(access, number, source[1], size, writes=False)
        copy.epoch = grid.races.agent_write(access, number, lane, target, size)
        grid.shared.shadow[target : target + size] = ALLOCATED | FLIGHT
        self.pending.add(copy)
        grid.device.after_a_while(lambda: self._finish_load(copy))

    def _finish_load(self, copy: BulkCopy) -> None:
        memory, at = copy.source
        shared, target = copy.target
        shared.data[target : target + copy.size] = memory.data[at : at + copy.size]
        defined = memory.shadow[at : at + copy.size] & READ
        shared.shadow[target : target + copy.size] = ALLOCATED | WRITE | defined
        self.pending.discard(copy)
        clocks = self.grid.races.agent_clocks(copy.epoch)
        self.grid.part(Mbarriers).complete_bytes(copy.barrier, copy.size, clocks)

    def store(self, access, number: int, lane: int, source: int, target: int, size: int):
        """Starts a copy from shared to global memory."""
        grid = self.grid
        memory = grid.device.memory
        copy = BulkCopy(access.instruction, number, lane, "store", (grid.shared, source),
                        (memory, target), size)  # fmt: skip
        self._check(copy)
        if grid.device.order is not None:
            grid.device.order.check_range(access, number, target, size, writes=True)
        grid.races.agent_read(access, number, lane, source, size)
        state = grid.shared.shadow[source : source + size]
        grid.shared.shadow[source : source + size] = (state & READ) | ALLOCATED | FLIGHT
        memory.shadow[target : target + size] = ALLOCATED | FLIGHT
        self.pending.add(copy)
        self._of(number, lane).open.append(copy)
        grid.device.after_a_while(lambda: self._finish_store(copy))

    def _read(self, copy: BulkCopy) -> None:
        if copy.data is None:
            shared, source = copy.source
            copy.data = shared.data[source : source + copy.size].copy()
            copy.defined = shared.shadow[source : source + copy.size] & READ
            shared.shadow[source : source + copy.size] = ALLOCATED | WRITE | copy.defined

    def _finish_store(self, copy: BulkCopy) -> None:
        if copy.done:
            return
        self._read(copy)
        memory, target = copy.target
        memory.data[target : target + copy.size] = copy.data
        memory.shadow[target : target + copy.size] = ALLOCATED | WRITE | copy.defined
        copy.done = True
        self.pending.discard(copy)

    def _of(self, number: int, lane: int) -> BulkGroups:
        return self.groups.setdefault((number, lane), BulkGroups())

    def commit(self, number: int, lane: int) -> None:
        """`cp.async.bulk.commit_group`."""
        groups = self._of(number, lane)
        groups.committed.append(groups.open)
        groups.open = []

    def wait(self, number: int, lane: int, keep: int, only_read: bool) -> None:
        """`cp.async.bulk.wait_group`: all but the last `keep` groups are read, or complete."""
        groups = self._of(number, lane).committed
        for group in groups[: max(len(groups) - keep, 0)]:
            for copy in group:
                if only_read:
                    self._read(copy)
                else:
                    self._finish_store(copy)

    def _check(self, copy: BulkCopy) -> None:
        ins = copy.instruction
        for (memory, at), wanted, what in (
            (copy.source, READ, "reads"),
            (copy.target, WRITE, "writes"),
        ):
            where = f"bulk copy of {copy.size} bytes {what} {memory.spell(at)}"
            state = memory.shadow[at : at + copy.size] if at >= 0 else memory.shadow[:0]
            if state.size < copy.size or not (state & ALLOCATED).all():
                raise OutOfBoundsError(f"{where}: out of bounds", ins)
            if at % self.ALIGNMENT or copy.size % self.ALIGNMENT or copy.size == 0:
                raise MisalignedError(f"{where}: address and size must be multiples of 16", ins)
            if wanted == WRITE and (state & FLIGHT).any():
                raise InFlightError(f"{where}, which another copy still uses", ins)
            if (state & (FLIGHT | READ) == FLIGHT).any():
                raise InFlightError(f"{where}, which another copy still writes", ins)
            if wanted == WRITE and not (state & WRITE).all():
                raise ReadOnlyError(f"{where}: the program may only read it", ins)

    def blocks_exited(self, blocks) -> None:
        """A block may not leave copies behind that still use its shared memory."""
        for copy in self.pending:
            block = self.grid.block_of[copy.number]
            busy = copy.kind == "load" or copy.data is None
            if busy and block in blocks:
                raise InFlightError(
                    f"block {block} exits while its bulk copy is in flight", copy.instruction
                )


class AsyncStores:
    """`st.async` of a launch: each lane's bytes and its report to an mbarrier arrive together."""

    def __init__(self, grid):
        self.grid = grid
        self.pending: list[np.ndarray] = []

    def issue(self, access, numbers, lanes, target, data, barrier) -> None:
        """Starts stores by some lanes of some warps.

        Args:
            access: the instruction and its group.
            numbers, lanes: which threads, one a store.
            target: offsets in the shared store.
            data: bytes, [stores, size].
            barrier: index of the mbarrier that each completes on.
        """
        grid, size = self.grid, data.shape[1]
        grid.shared.claim(target, size, access)
        self.pending.append(target)
        words = ((target.astype(np.int64) >> 2)[:, None] + np.arange(size // 4)).ravel()
        owners = grid.block_of[numbers] // grid.cluster_size
        for cluster in np.unique(owners):
            mine = owners == cluster
            each = np.repeat(mine, size // 4)
            threads = np.repeat(numbers, size // 4)[each], np.repeat(lanes, size // 4)[each]
            epoch = grid.races.async_write(access, *threads, words[each])
            clocks = grid.races.agent_clocks(epoch)
            # What the threads had read before they stored cannot be read later.
            known = grid.races.release_lanes(numbers[mine], lanes[mine]).max(axis=0)
            self._deliver_later(target, data, barrier, mine, np.maximum(clocks, known))

    def _deliver_later(self, target, data, barrier, which, clocks) -> None:
        def deliver():
            shared = self.grid.shared
            at = target[which].astype(np.int64)[:, None] + np.arange(data.shape[1])
            shared.data[at] = data[which]
            shared.shadow[at] = ALLOCATED | WRITE | READ
            self.pending = [left for left in self.pending if left is not target]
            for index, count in zip(*np.unique(barrier[which], return_counts=True), strict=True):
                num_bytes = int(count) * data.shape[1]
                self.grid.part(Mbarriers).complete_bytes(int(index), num_bytes, clocks)

        self.grid.device.after_a_while(deliver)

    def blocks_exited(self, blocks) -> None:
        """A block must wait for what others store into it."""
        shared = self.grid.shared
        for target in self.pending:
            block = shared.block(target.astype(np.int64))
            if np.isin(block, blocks).any():
                raise InFlightError(
                    f"block {int(block[np.isin(block, blocks)][0])} exits while an asynchronous "
                    "store into its shared memory is in flight",
                    None,
                )
