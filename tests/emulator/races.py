"""Race detector for shared memory: vector clocks per warp, epochs per 4-byte word.

A warp counts as one thread: its own accesses are ordered by its program. Clocks cover the warps of
one cluster, and have two more components: the asynchronous copy engine, and whether
`griddepcontrol.wait` came before. Barriers, mbarriers and
synchronising accesses pass clocks on; an access races when the last conflicting one is not in the
warp's clock. Words accessed in parts remember which bytes the last access touched.
"""

import numpy as np

from .errors import RaceError


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
        words = grid.shared.data.size // 4
        self.writer = np.zeros(words, np.int16)
        self.write_epoch = np.zeros(words, np.int32)
        self.write_bytes = np.zeros(words, np.uint8)
        self.read_epoch = np.zeros((words, self.width), np.int32)
        self.read_bytes = np.zeros((words, self.width), np.uint8)
        self.agent_clock = np.zeros(-(-grid.num_blocks // grid.cluster_size), np.int32)
        self.fenced = np.zeros_like(self.clock)
        self.strong: dict[int, np.ndarray] = {}

    # Passing clocks on.

    def release(self, numbers) -> np.ndarray:
        """Clocks of some warps, for others to acquire; the warps move on to a new epoch."""
        clocks = self.clock[numbers]
        self.clock[numbers, self.local[numbers]] += 1
        return clocks

    def acquire(self, numbers, clocks: np.ndarray) -> None:
        """Orders what comes next in some warps after everything in `clocks`."""
        self.clock[numbers] = np.maximum(self.clock[numbers], clocks)

    # Accesses.

    def read(self, access, offset, size: int) -> None:
        """Checks and records a read by a group."""
        numbers, words, touched = self._words(access, offset, size)
        if access.strong:
            self._synchronise(numbers, words, writes=False)
            return
        self._check_writes(access, numbers, words, touched, "reads")
        local = self.local[numbers]
        self.read_epoch[words, local] = self.clock[numbers, local]
        self.read_bytes[words, local] = touched

    def write(self, access, offset, size: int) -> None:
        """Checks and records a write by a group."""
        numbers, words, touched = self._words(access, offset, size)
        if access.strong:
            self._synchronise(numbers, words, writes=True)
            return
        self._check_writes(access, numbers, words, touched, "writes")
        self._check_reads(access, numbers, words, touched)
        local = self.local[numbers]
        self.writer[words] = local + 1
        self.write_epoch[words] = self.clock[numbers, local]
        self.write_bytes[words] = touched

    def _words(self, access, offset, size: int):
        """Flat arrays: warp, word and touched bytes of every word accessed."""
        mask = access.mask
        numbers = np.broadcast_to(access.group.numbers[:, None], offset.shape)
        offset, numbers = (
            (offset.ravel(), numbers.ravel()) if mask is None else (offset[mask], numbers[mask])
        )
        offset = offset.astype(np.int64)
        if size < 4:
            return numbers, offset >> 2, ((1 << size) - 1) << (offset & 3)
        words = (offset >> 2)[:, None] + np.arange(size // 4)
        return np.repeat(numbers, size // 4), words.ravel(), 15

    def _check_writes(self, access, numbers, words, touched, verb: str) -> None:
        try:
            writer = self.writer[words]
        except IndexError:
            return  # out of bounds: the memory check names it
        late = self.write_epoch[words] > self.clock[numbers, writer - 1]
        bad = late & (writer != 0) & ((self.write_bytes[words] & touched) != 0)
        if bad.any():
            i = int(bad.argmax())
            self._report(access, numbers[i], words[i], f"{verb} what", int(writer[i]) - 1, "wrote")

    def _check_reads(self, access, numbers, words, touched) -> None:
        late = self.read_epoch[words] > self.clock[numbers]
        if not late.any():
            return
        bytes_touched = np.broadcast_to(touched, words.shape)[:, None]
        bad = late & ((self.read_bytes[words] & bytes_touched) != 0)
        if bad.any():
            i, reader = (int(v[0]) for v in np.nonzero(bad))
            self._report(access, numbers[i], words[i], "overwrites what", reader, "read")

    def _report(self, access, number, word, verb: str, other: int, did: str) -> None:
        grid = self.grid
        if other == self.agent:
            who = "an asynchronous copy"
        else:
            block, warp = divmod(other, grid.warps_per_block)
            who = (
                f"warp {warp} of its block"
                if grid.cluster_size == 1
                else (f"warp {warp} of block {block} of its cluster")
            )
        raise RaceError(
            f"block {grid.block_of[number]}, warp {grid.warp_in_block[number]} {verb} {who} {did} "
            f"in {grid.shared.spell(int(word) * 4)} with nothing to order the two",
            access.instruction,
        )

    def _synchronise(self, numbers, words, writes: bool) -> None:
        """A strong access takes and, writing, gives the clocks of its word."""
        for number, word in set(zip(numbers.tolist(), words.tolist(), strict=True)):
            known = self.strong.get(word)
            if known is not None:
                self.acquire(number, known)
            if writes:
                mine = self.release(number)
                self.strong[word] = mine if known is None else np.maximum(known, mine)
                self.writer[word] = 0

    # The copy engine.

    def agent_write(self, access, number: int, start: int, num_bytes: int) -> int:
        """A bulk copy into shared memory, issued by a warp: its epoch on the engine's clock."""
        words = np.arange(start >> 2, (start + num_bytes + 3) >> 2)
        numbers = np.full(words.size, number)
        self._check_writes(access, numbers, words, 15, "overwrites by a copy")
        self._check_reads(access, numbers, words, 15)
        cluster = self.grid.block_of[number] // self.grid.cluster_size
        self.agent_clock[cluster] += 1
        self.writer[words] = self.agent + 1
        self.write_epoch[words] = self.agent_clock[cluster]
        self.write_bytes[words] = 15
        return int(self.agent_clock[cluster])

    def agent_read(self, access, number: int, start: int, num_bytes: int) -> None:
        """A bulk copy out of shared memory, issued by a warp."""
        words = np.arange(start >> 2, (start + num_bytes + 3) >> 2)
        self.async_read(access, np.full(words.size, number), words)

    def async_read(self, access, numbers, words) -> None:
        """Words read by the asynchronous proxy (a copy, a matrix instruction) for some warps."""
        if words.size and (words.min() < 0 or words.max() >= self.writer.size):
            return  # out of bounds: the memory check names it
        self._check_writes(access, numbers, words, 15, "reads")
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
