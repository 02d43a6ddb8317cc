"""One memory access of a group: who does it, for messages, counters and the race detector."""

from dataclasses import dataclass

import numpy as np

from .errors import EmulationError, RaceError
from .instruction import Instruction
from .memory import SharedMemory


@dataclass
class Access:
    """An instruction executed by the lanes `mask` of a group.

    Attributes:
        instruction: the instruction.
        group: the warps.
        mask: active lanes, None for all.
        strong: a synchronising access, which the race detector takes as ordering.
    """

    instruction: Instruction
    group: object
    mask: object
    strong: bool = False

    def lane(self, index: int, compressed=None) -> str:
        """Names the lane at a flat index of the group, or of its active lanes."""
        if compressed is not None:
            index = int(np.flatnonzero(compressed.ravel())[index])
        per_row = 32
        row, lane = divmod(index, per_row)
        grid, number = self.group.grid, self.group.numbers[row]
        return f"block {grid.block_of[number]}, warp {grid.warp_in_block[number]}, lane {lane}"

    def error(self, message: str) -> EmulationError:
        first = int(np.flatnonzero(self.group.active(self.mask).ravel())[0])
        return EmulationError(f"{message} ({self.lane(first)})", self.instruction)

    def undefined(self, flags: np.ndarray) -> None:
        """Called when a load reads elements, [warps, 32, count], that nothing wrote."""
        self.group.undefined = flags
        self.group.grid.device.undefined_load = self.instruction.where

    def conflict(self, offset) -> None:
        """Called when lanes of one store wrote different values to one place."""
        if self.strong:
            return
        raise RaceError(
            "lanes of one instruction store different values to one address", self.instruction
        )

    def note(self, memory, offset, size: int) -> None:
        """Counts the access, if the device counts."""
        counters = self.group.grid.device.counters
        if counters is None:
            return
        shared = isinstance(memory, SharedMemory)
        count = counters.shared if shared else counters.global_
        count(self.instruction.line, offset, size, self.mask)

    def ordered_read(self, memory, offset, size: int) -> None:
        """Tells the race detectors of a read."""
        grid = self.group.grid
        if memory is grid.shared:
            grid.races.read(self, offset, size)
        elif memory is grid.device.memory and grid.device.order is not None:
            grid.device.order.check(self, offset, size, writes=False)

    def ordered_write(self, memory, offset, size: int) -> None:
        """Tells the race detectors of a write."""
        grid = self.group.grid
        if memory is grid.shared:
            grid.races.write(self, offset, size)
        elif memory is grid.device.memory and grid.device.order is not None:
            grid.device.order.check(self, offset, size, writes=True)
