"""Warpgroup matrix instructions in flight: whose accumulators and whose operands are not free yet.

The sums are computed when the instruction is issued. Until the warp has waited for its group, its
accumulators may only be copied or accumulated into, and nobody may overwrite the shared memory that
the instruction reads.
"""

from dataclasses import dataclass, field

import numpy as np

from .errors import InFlightError
from .races import NEVER


@dataclass
class Group:
    """The instructions of one warp between two commits."""

    accumulators: int = 0
    """Bit set of slots."""
    words: list[np.ndarray] = field(default_factory=list)


class Warpgroups:
    """Groups of every warp of a launch."""

    def __init__(self, grid):
        self.grid = grid
        self.open: dict[int, Group] = {}
        self.committed: dict[int, list[Group]] = {}
        self.busy = 0

    def issue(self, number: int, accumulators: int, words: np.ndarray) -> None:
        """One instruction of a warp: its accumulator slots, the words of shared memory it reads."""
        group = self.open.setdefault(number, Group())
        group.accumulators |= accumulators
        self.busy |= accumulators
        if words.size:
            group.words.append(words)
            races = self.grid.races
            races.read_epoch[words, races.local[number]] = NEVER
            races.read_bytes[words, races.local[number]] = 15
            races.read_lane[words, races.local[number]] = 0

    def commit(self, numbers) -> None:
        """`wgmma.commit_group`."""
        for number in numbers.tolist():
            self.committed.setdefault(number, []).append(self.open.pop(number, Group()))

    def wait(self, numbers, keep: int) -> None:
        """`wgmma.wait_group`: all but the last `keep` groups end."""
        for number in numbers.tolist():
            groups = self.committed.get(number, [])
            done, self.committed[number] = (
                groups[: len(groups) - keep],
                groups[len(groups) - keep :],
            )
            if keep == 0:
                self.committed[number] = []
                done = groups
            kept = self._words(number)
            for group in done:
                for words in group.words:
                    self._end_reads(number, words, kept)
        self.busy = 0
        for number in [*self.open, *self.committed]:
            self.busy |= self._accumulators(number)

    def _all(self, number: int) -> list[Group]:
        open_group = self.open.get(number)
        return [*self.committed.get(number, []), *([open_group] if open_group else [])]

    def _words(self, number: int) -> np.ndarray:
        words = [w for group in self._all(number) for w in group.words]
        return np.concatenate(words) if words else np.zeros(0, np.int64)

    def _end_reads(self, number: int, words, kept) -> None:
        races = self.grid.races
        over = words[~np.isin(words, kept)] if kept.size else words
        local = races.local[number]
        races.read_epoch[over, local] = races.clock[number, local]

    def _accumulators(self, number: int) -> int:
        bits = 0
        for group in self._all(number):
            bits |= group.accumulators
        return bits

    def check(self, op, group) -> None:
        """Refuses the use of an accumulator in flight; a copy of one is in flight too."""
        if not op.use_bits & self.busy or op.instruction.opcode == "wgmma":
            return
        for number in group.numbers.tolist():
            for pending in self._all(number):
                if not op.use_bits & pending.accumulators:
                    continue
                if op.instruction.opcode == "mov":
                    for slot in op.defs:
                        pending.accumulators |= 1 << slot
                        self.busy |= 1 << slot
                    continue
                raise InFlightError(
                    f"block {self.grid.block_of[number]}, warp {self.grid.warp_in_block[number]} "
                    "uses an accumulator before wgmma.wait_group",
                    op.instruction,
                )

    def blocks_exited(self, blocks) -> None:
        """A block may not leave instructions in flight."""
        for number in [*self.open, *self.committed]:
            if self.grid.block_of[number] in blocks and self._accumulators(number):
                raise InFlightError(
                    f"block {self.grid.block_of[number]} exits with wgmma in flight "
                    f"(warp {self.grid.warp_in_block[number]})"
                )
