"""Race detector for shared memory: vector clocks per warp, epochs per 4-byte word.

Clocks cover the warps of one cluster, and have two more components: the asynchronous copy engine,
and whether `griddepcontrol.wait` came before. Barriers, mbarriers and synchronising accesses pass
clocks on; an access races when the last conflicting one is not in the warp's clock.

Inside a warp, every warp-synchronous instruction begins an interval: what different lanes do within
one is unordered, and a lane that arrives at an mbarrier alone vouches for the others' accesses of
earlier intervals only. Words remember the lane of the last access and which bytes it touched.
"""

from dataclasses import dataclass

import numpy as np

from .errors import RaceError
from .types import LANES

NEVER = 1 << 30
"""Epoch of a read that has not ended: later than any clock."""


@dataclass
class Touch:
    """The words of an access, flat: who touches which bytes of which word."""

    access: object
    numbers: np.ndarray
    lanes: np.ndarray
    words: np.ndarray
    touched: np.ndarray | int = 15

    @classmethod
    def of(cls, access, offset, size: int) -> "Touch":
        """The words that the active lanes of a group access."""
        numbers = np.broadcast_to(access.group.numbers[:, None], offset.shape)
        lanes = np.broadcast_to(np.arange(LANES), offset.shape)
        pick = np.ravel if access.mask is None else (lambda values: values[access.mask])
        offset, numbers, lanes = pick(offset).astype(np.int64), pick(numbers), pick(lanes)
        if size < 4:
            return cls(access, numbers, lanes, offset >> 2, ((1 << size) - 1) << (offset & 3))
        words = (offset >> 2)[:, None] + np.arange(size // 4)
        each = size // 4
        return cls(access, np.repeat(numbers, each), np.repeat(lanes, each), words.ravel())


class Races:
    """Clocks and epochs of one launch."""

    def __init__(self, grid):
        self.grid = grid
        threads = grid.cluster_size * grid.warps_per_block
        self.agent, self.waited, self.width = threads, threads + 1, threads + 2
        warps = np.arange(grid.num_warps)
        self.local = warps % threads
        self.clock = np.zeros((grid.num_warps, self.width), np.int32)
        self.clock[warps, self.local] = 1
        self.interval = np.ones(grid.num_warps, np.int32)
        self.vouched = np.zeros((grid.num_warps, LANES), np.int32)
        words = grid.shared.data.size // 4
        self.writer = np.zeros(words, np.int16)
        self.write_epoch = np.zeros(words, np.int32)
        self.write_bytes = np.zeros(words, np.uint8)
        self.write_lane = np.zeros(words, np.uint8)
        self.read_epoch = np.zeros((words, self.width), np.int32)
        self.read_bytes = np.zeros((words, self.width), np.uint8)
        self.read_lane = np.zeros((words, self.width), np.uint8)
        self.agent_clock = np.zeros(-(-grid.num_blocks // grid.cluster_size), np.int32)
        self.fenced = np.zeros_like(self.clock)
        self.strong: dict[int, np.ndarray] = {}

    # Passing clocks on.

    def synchronise_warps(self, numbers) -> None:
        """Warp-synchronous instructions order the accesses of a warp's lanes."""
        local = self.local[numbers]
        self.clock[numbers, local] += 1
        self.interval[numbers] = self.clock[numbers, local]

    def release(self, numbers) -> np.ndarray:
        """Clocks of whole warps, for others to acquire; the warps move on to a new epoch."""
        clocks = self.clock[numbers]
        self.synchronise_warps(numbers)
        return clocks

    def release_lanes(self, numbers, lanes) -> np.ndarray:
        """Clocks of some lanes, one row a lane; lanes alone vouch for earlier intervals only."""
        warps, counts = np.unique(numbers, return_counts=True)
        living = (self.grid.pc[warps] != self.grid.EXITED).sum(axis=1)
        alone = np.isin(numbers, warps[counts < living])
        clocks = self.clock[numbers]
        local = self.local[numbers]
        own = clocks[np.arange(len(numbers)), local]
        clocks[np.arange(len(numbers)), local] = np.where(alone, self.interval[numbers] - 1, own)
        self.vouched[numbers, lanes] = own
        self.clock[numbers, local] += 1
        return clocks

    def acquire(self, numbers, clocks: np.ndarray) -> None:
        """Orders what comes next in some warps after everything in `clocks`."""
        self.clock[numbers] = np.maximum(self.clock[numbers], clocks)

    # Accesses.

    def read(self, access, offset, size: int) -> None:
        """Checks and records a read by a group."""
        touch = Touch.of(access, offset, size)
        if access.strong:
            self._synchronise(touch, writes=False)
        elif self._exists(touch):
            self._check_writes(touch, "reads")
            local = self.local[touch.numbers]
            self.read_epoch[touch.words, local] = self.clock[touch.numbers, local]
            self.read_bytes[touch.words, local] = touch.touched
            self.read_lane[touch.words, local] = touch.lanes

    def write(self, access, offset, size: int) -> None:
        """Checks and records a write by a group."""
        touch = Touch.of(access, offset, size)
        if access.strong:
            self._synchronise(touch, writes=True)
        elif self._exists(touch):
            self._check_writes(touch, "writes")
            self._check_reads(touch)
            local = self.local[touch.numbers]
            self.writer[touch.words] = local + 1
            self.write_epoch[touch.words] = self.clock[touch.numbers, local]
            self.write_bytes[touch.words] = touch.touched
            self.write_lane[touch.words] = touch.lanes

    def _exists(self, touch: Touch) -> bool:
        """False for words out of bounds, which the memory's own check will name."""
        words = touch.words
        return not words.size or (words.min() >= 0 and words.max() < self.writer.size)

    def _check_writes(self, touch: Touch, verb: str) -> None:
        numbers, words = touch.numbers, touch.words
        writer, epoch, lane = self.writer[words], self.write_epoch[words], self.write_lane[words]
        other = writer - 1
        late = epoch > self.clock[numbers, other]
        within = (other == self.local[numbers]) & (epoch >= self.interval[numbers])
        within &= lane != touch.lanes
        if not (late | within).any():
            return
        first = numbers - self.local[numbers]
        warp = np.where(other < self.agent, first + other, 0)
        late &= (self.vouched[warp, lane] < epoch) | (other == self.agent)
        bad = (late | within) & (writer != 0) & ((self.write_bytes[words] & touch.touched) != 0)
        if bad.any():
            i = int(bad.argmax())
            self._report(touch, i, f"{verb} what", int(other[i]), int(lane[i]), "wrote")

    def _check_reads(self, touch: Touch) -> None:
        numbers, words = touch.numbers, touch.words
        epoch, lane = self.read_epoch[words], self.read_lane[words]
        late = epoch > self.clock[numbers]
        at = np.arange(len(words))
        local = self.local[numbers]
        within = (epoch[at, local] >= self.interval[numbers]) & (lane[at, local] != touch.lanes)
        if not (late.any() or within.any()):
            return
        first = (numbers - local)[:, None]
        warp = np.minimum(first + np.arange(self.width), len(self.vouched) - 1)
        late &= (self.vouched[warp, lane] < epoch) | (epoch >= NEVER)
        late[at, local] |= within
        bad = late & ((self.read_bytes[words] & np.reshape(touch.touched, (-1, 1))) != 0)
        if bad.any():
            i, reader = (int(v[0]) for v in np.nonzero(bad))
            self._report(touch, i, "overwrites what", reader, int(lane[i, reader]), "read")

    def _report(self, touch: Touch, i: int, verb: str, other: int, lane: int, did: str) -> None:
        grid, number = self.grid, int(touch.numbers[i])
        block, warp = divmod(other, grid.warps_per_block)
        if other == self.agent:
            who = "an asynchronous copy"
        elif other == self.local[number]:
            who = f"lane {lane} of the same warp"
        elif grid.cluster_size == 1:
            who = f"warp {warp} of its block"
        else:
            who = f"warp {warp} of block {block} of its cluster"
        message = (
            f"block {grid.block_of[number]}, warp {grid.warp_in_block[number]}, lane "
            f"{touch.lanes[i]} {verb} {who} {did} in {grid.shared.spell(int(touch.words[i]) * 4)} "
            "with nothing to order the two"
        )
        if other < self.agent and other != self.local[number]:
            theirs = self.vouched[number - self.local[number] + other]
            if theirs.max() > theirs[lane]:
                message += (
                    f" (it was lane {lane}; lane {theirs.argmax()} arrived for its warp, but it "
                    "speaks for other lanes only after a bar.warp.sync)"
                )
        raise RaceError(message, touch.access.instruction)

    def _synchronise(self, touch: Touch, writes: bool) -> None:
        """A strong access takes and, writing, gives the clocks of its word."""
        rows = np.unique(np.stack([touch.numbers, touch.lanes, touch.words]), axis=1)
        for number, lane, word in rows.T.tolist():
            known = self.strong.get(word)
            if known is not None:
                self.acquire(number, known)
            if writes:
                mine = self.release_lanes(np.array([number]), np.array([lane]))[0]
                self.strong[word] = mine if known is None else np.maximum(known, mine)
                self.writer[word] = 0

    # The copy engine.

    def agent_write(self, access, number: int, lane: int, start: int, num_bytes: int) -> int:
        """A bulk copy into shared memory, issued by a warp: its epoch on the engine's clock."""
        words = np.arange(start >> 2, (start + num_bytes + 3) >> 2)
        return self.async_write(
            access, np.full(words.size, number), np.full(words.size, lane), words
        )

    def async_write(self, access, numbers, lanes, words) -> int:
        """Words of one cluster written asynchronously for some warps: their epoch."""
        touch = Touch(access, numbers, lanes, words)
        self._check_writes(touch, "overwrites by a copy")
        self._check_reads(touch)
        cluster = self.grid.block_of[numbers[0]] // self.grid.cluster_size
        self.agent_clock[cluster] += 1
        self.writer[words] = self.agent + 1
        self.write_epoch[words] = self.agent_clock[cluster]
        self.write_bytes[words] = 15
        self.write_lane[words] = 0
        return int(self.agent_clock[cluster])

    def agent_read(self, access, number: int, lane: int, start: int, num_bytes: int) -> None:
        """A bulk copy out of shared memory, issued by a warp."""
        words = np.arange(start >> 2, (start + num_bytes + 3) >> 2)
        self.async_read(access, np.full(words.size, number), np.full(words.size, lane), words)

    def async_read(self, access, numbers, lanes, words) -> None:
        """Words read by the asynchronous proxy (a copy, a matrix instruction) for some warps."""
        touch = Touch(access, numbers, lanes, words)
        if not self._exists(touch):
            return
        self._check_writes(touch, "reads")
        writer, epoch = self.writer[words], self.write_epoch[words]
        first = numbers - self.local[numbers]
        seen_by_writer = self.fenced[np.minimum(first + writer - 1, len(self.fenced) - 1),
                                     np.maximum(writer - 1, 0)]  # fmt: skip
        seen = np.maximum(seen_by_writer, self.fenced[numbers, np.maximum(writer - 1, 0)])
        bare = (epoch > seen) & (writer != 0) & (writer - 1 != self.agent)
        if bare.any():
            where = self.grid.shared.spell(int(words[bare.argmax()]) * 4)
            raise RaceError(
                f"the asynchronous proxy reads {where}, written by ordinary stores with no "
                "fence.proxy.async since",
                access.instruction,
            )

    def fence_proxy(self, numbers) -> None:
        """`fence.proxy.async`: what some warps wrote or acquired is visible to the copy engine."""
        self.fenced[numbers] = self.clock[numbers]
        self.clock[numbers, self.local[numbers]] += 1

    def agent_clocks(self, epoch: int) -> np.ndarray:
        """What a barrier that a copy completes on passes to its waiters."""
        clocks = np.zeros(self.width, np.int32)
        clocks[self.agent] = epoch
        return clocks
