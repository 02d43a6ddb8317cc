"""Accesses of overlapping launches to global memory that nothing orders.

A launch that overlaps the one before it is ordered after it only once it has executed
`griddepcontrol.wait` (or met a warp that has), and after earlier ones only if those waited in turn.
Where all that let it start had waited before, it is ordered after those earlier ones from the
start. Every 2 bytes of global memory remember which launch wrote and which read them last; an
access that meets one of an unordered launch is an error whatever the schedule. Pairs of
synchronising accesses (volatile, relaxed, acquire, release, atomics) are exempt: that is how
kernels hand over data.
"""

import numpy as np

from .errors import RaceError


class LaunchOrder:
    """Who wrote and read global memory last, among launches some of which overlap."""

    GRAIN = 2

    def __init__(self, device, num_launches: int):
        grains = device.memory.data.size // self.GRAIN
        self.device = device
        self.writer = np.zeros(grains, np.uint16)
        self.reader = np.zeros(grains, np.uint16)
        self.strongly_written = np.zeros(grains, bool)
        self.strongly_read = np.zeros(grains, bool)
        self.grids: list = [None] * (num_launches + 1)
        self.clash: dict = {}
        self.hasty: set = set()

    def start(self, grid, previous) -> None:
        """A launch begins, overlapping `previous` or, if that is None, after all before it."""
        grid.order_id = next(i for i, g in enumerate(self.grids) if i and g is None)
        self.grids[grid.order_id] = grid
        table = np.zeros((2, len(self.grids)), bool)
        if previous is not None:
            earlier = [i for i, g in enumerate(self.grids[: grid.order_id]) if self._same(g, grid)]
            table[0, earlier] = True
            if previous not in self.hasty:
                before = slice(previous.order_id)
                table[0, before] = self.clash[previous][1, before]
        self.clash[grid] = table
        for other, theirs in self.clash.items():
            if other is not grid and self._same(other, grid):
                theirs[:, grid.order_id] = True

    @staticmethod
    def _same(one, other) -> bool:
        return one is not None and one.launch.stream == other.launch.stream

    def trigger(self, grid, numbers) -> None:
        """Some warps let the next launch start: by an instruction, or as they exit."""
        if not self._has_waited(grid)[numbers].all():
            self.hasty.add(grid)

    def wait(self, grid, numbers, previous) -> None:
        """Some warps passed `griddepcontrol.wait`."""
        if previous is None:
            return
        table = self.clash[grid]
        chain = np.zeros(table.shape[1], bool)
        waited = np.zeros(previous.num_blocks, bool)
        np.logical_or.at(waited, previous.block_of, self._has_waited(previous).astype(bool))
        chain[: previous.order_id] = self.clash[previous][int(waited.all()), : previous.order_id]
        later = table[1].copy()
        later[: grid.order_id] = chain[: grid.order_id]
        table[1] = later
        grid.races.clock[numbers, grid.races.waited] = 1

    @staticmethod
    def _has_waited(grid) -> np.ndarray:
        """1 for every warp that waited, or was ordered after one that did."""
        return grid.races.clock[:, grid.races.waited]

    def check(self, access, offset, size: int, writes: bool) -> None:
        """Checks and records an access by a group; offsets lie in global memory."""
        group, mask = access.group, access.mask
        grid = group.grid
        numbers = np.broadcast_to(group.numbers[:, None], offset.shape)
        if mask is not None:
            offset, numbers = offset[mask], numbers[mask]
        grains = (offset.ravel().astype(np.int64) // self.GRAIN)[:, None] + np.arange(
            max(size // self.GRAIN, 1)
        )
        if grains.size and (grains.min() < 0 or grains.max() >= self.writer.size):
            return  # out of bounds: the memory check names it
        self._refuse(access, grid, numbers.ravel(), grains, writes)
        self._record(grid, grains, writes, access.strong)

    def check_range(self, access, number: int, start: int, num_bytes: int, writes: bool) -> None:
        """The same for a bulk copy issued by one warp."""
        grains = np.arange(start // self.GRAIN, (start + num_bytes) // self.GRAIN)[None]
        grid = access.group.grid
        self._refuse(access, grid, np.array([number]), grains, writes)
        self._record(grid, grains, writes, False)

    def _record(self, grid, grains, writes: bool, strong: bool) -> None:
        (self.writer if writes else self.reader)[grains] = grid.order_id
        (self.strongly_written if writes else self.strongly_read)[grains] = strong

    def _refuse(self, access, grid, numbers, grains, writes: bool) -> None:
        table, waited = self.clash[grid], self._has_waited(grid)[numbers][:, None]
        for last, strongly, did in (
            (self.writer, self.strongly_written, "writes"),
            (self.reader, self.strongly_read, "reads"),
        )[: 1 + writes]:
            bad = table[waited, last[grains]]
            if access.strong:
                bad &= ~strongly[grains]
            if bad.any():
                row, column = np.argwhere(bad)[0].tolist()
                other = self.grids[int(last[grains[row, column]])]
                where = self.device.memory.spell(int(grains[row, column]) * self.GRAIN)
                raise RaceError(
                    f"block {grid.block_of[numbers[row]]} {'writes' if writes else 'reads'} "
                    f"{where}, which launch {other.launch.number} ({other.code.entry.name}) {did}, "
                    "and no griddepcontrol.wait orders the two",
                    access.instruction,
                )
