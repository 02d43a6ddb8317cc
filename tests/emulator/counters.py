"""Counts of shared-memory bank conflicts and global sectors per instruction."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Counters:
    """Per PTX line: accesses by warps, and what they cost.

    Attributes:
        wavefronts: line -> [warp accesses, passes through the 32 banks of shared memory].
        sectors: line -> [warp accesses, 32-byte sectors of global memory].
    """

    wavefronts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    sectors: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def shared(self, line: int, offset: np.ndarray, size: int, mask) -> None:
        """Counts one access of a group to shared memory."""
        for row in range(offset.shape[0]):
            lanes = offset[row] if mask is None else offset[row][mask[row]]
            if lanes.size:
                self.wavefronts[line][0] += 1
                self.wavefronts[line][1] += _wavefronts(lanes, size)

    def global_(self, line: int, offset: np.ndarray, size: int, mask) -> None:
        """Counts one access of a group to global memory."""
        for row in range(offset.shape[0]):
            lanes = offset[row] if mask is None else offset[row][mask[row]]
            if lanes.size:
                touched = lanes[:, None] + np.arange(0, max(size, 1), 32, dtype=np.uint64)
                self.sectors[line][0] += 1
                self.sectors[line][1] += np.unique(touched >> np.uint64(5)).size


def _wavefronts(lanes: np.ndarray, size: int) -> int:
    """Passes: 128 bytes a pass, each bank one distinct word; wide accesses go in lane groups."""
    per_pass = max(1, min(32, 128 // size))
    total = 0
    for at in range(0, lanes.size, per_pass):
        part = lanes[at : at + per_pass]
        words = np.unique((part[:, None] + np.arange(0, size, 4, dtype=np.uint64)) >> np.uint64(2))
        total += np.bincount((words % np.uint64(32)).astype(np.int64)).max()
    return int(total)
