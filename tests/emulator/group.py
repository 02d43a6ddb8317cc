"""The warps that execute a block of code together."""

import numpy as np

from .types import LANES


class Group:
    """The warps that execute a block of code together.

    Attributes:
        grid: the launch.
        numbers: the numbers of the warps.
        warps: `numbers`, as a slice where they are contiguous.
        count: how many.
        mask: active lanes [count, 32], or None if all are.
        undefined: elements that the last load read and nothing wrote, or None.
        storing: elements of the running store that are undefined, or None.
    """

    __slots__ = ("count", "grid", "mask", "numbers", "storing", "undefined", "warps")

    def __init__(self, grid, warps, numbers, mask):
        self.grid, self.warps, self.mask = grid, warps, mask
        self.numbers = numbers
        self.count = len(numbers)
        self.undefined = self.storing = None

    def rows(self, per_warp: np.ndarray) -> np.ndarray:
        """The group's rows of an array with one row per warp of the grid."""
        return per_warp[self.warps]

    def active(self, mask) -> np.ndarray:
        """The mask as an array."""
        return np.ones((self.count, LANES), bool) if mask is None else mask

    def and_mask(self, guard: np.ndarray):
        """Lanes that are active and whose guard holds; None for all."""
        if self.mask is None:
            if guard.shape != (self.count, LANES):
                guard = np.broadcast_to(guard, (self.count, LANES))
            return None if guard.all() else guard
        return self.mask & guard

    def wide(self, values: np.ndarray) -> np.ndarray:
        """Values that may be uniform, as [count, 32]."""
        shape = (self.count, LANES)
        return values if values.shape == shape else np.broadcast_to(values, shape)
