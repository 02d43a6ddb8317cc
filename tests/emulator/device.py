"""The device: memory, launches in stream order with programmatic overlap, asynchronous events.

Everything that may happen later than the instruction that asked for it (a bulk copy's bytes, say)
is an event with a due time. Events fall due after a number of sweeps, drawn from the seed, or at
once when nothing else can go on.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .counters import Counters
from .errors import DeadlockError, EmulationError, LaunchError
from .flow import Code
from .grid import Grid
from .hazards import LaunchOrder
from .memory import GlobalMemory, LocalMemory, SharedMemory
from .report import waiting_report


@dataclass
class LaunchSpec:
    """One launch, arguments encoded.

    Attributes:
        code: the kernel.
        grid, block, cluster: extents (x, y, z).
        shared_bytes: dynamic shared memory of a block.
        parameter_bytes: the bytes of every parameter.
        overlaps_previous: programmatic dependent launch.
        stream: launches of different streams (ranks) are unordered.
        number: position in the stream.
    """

    code: Code
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameter_bytes: dict[str, bytes]
    overlaps_previous: bool = False
    stream: int = 0
    number: int = 0

    def __post_init__(self):
        self.variables: dict[str, tuple[str, int]] = {}
        offset = SharedMemory.RESERVED
        for v in {**self.code.module.variables, **self.code.entry.variables}.values():
            if v.space == "shared" and not v.external:
                offset = -(-offset // v.align) * v.align
                self.variables[v.name] = ("shared", offset)
                offset += v.num_bytes
        for v in self.code.module.variables.values():
            if v.space == "shared" and v.external:
                offset = -(-offset // max(v.align, 16)) * max(v.align, 16)
                self.variables[v.name] = ("shared", offset)
        self.total_shared = offset - SharedMemory.RESERVED + self.shared_bytes
        offset = LocalMemory.START
        for v in self.code.entry.variables.values():
            if v.space == "local":
                offset = -(-offset // v.align) * v.align
                self.variables[v.name] = ("local", offset)
                offset += v.num_bytes
        self.local_bytes = offset - LocalMemory.START

    def variable_address(self, grid: Grid, name: str) -> np.ndarray:
        """Address of a variable, per warp where it depends on the block."""
        space, offset = self.variables.get(name, ("unknown", 0))
        if space == "shared":
            rank = grid.block_of % grid.cluster_size
            return ((rank << SharedMemory.RANK_SHIFT) | offset)[:, None]
        if space == "local":
            return np.full((1, 1), offset)
        raise LaunchError(f"variable {name!r} is in a state space that is not implemented")


class Device:
    """Runs launches to completion.

    Args:
        memory: global memory, filled.
        seed: None for the deterministic schedule, else a number that draws another one.
        num_sms: streaming multiprocessors, which bound the resident blocks.
        patience: sweeps without any change of memory before the launch counts as hung.
        max_steps: blocks of code executed before giving up.
        count: keep bank-conflict and sector counters.

    Attributes:
        executed: for each kernel, the PTX lines that some lane executed.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        seed: int | None = None,
        num_sms: int = 132,
        patience: int = 200,
        max_steps: int = 20_000_000,
        count: bool = False,
    ):
        self.memory = memory
        self.random = None if seed is None else np.random.default_rng(seed)
        self.num_sms, self.patience, self.max_steps = num_sms, patience, max_steps
        self.steps_per_sweep = 100_000
        self.counters = Counters() if count else None
        self.progress = 0
        self.steps = 0
        self.time = 0
        self.undefined_load = ""
        self.executed: dict[str, set[int]] = {}
        self.order: LaunchOrder | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_number = 0
        self.running: list[Grid] = []
        self.triggered: dict[Grid, set[int]] = {}
        self.queue: list[LaunchSpec] = []
        self._last: dict[int, Grid] = {}
        self._previous: dict[Grid, Grid | None] = {}

    def after_a_while(self, action: Callable[[], None]) -> None:
        """Schedules an asynchronous event."""
        delay = 2 if self.random is None else int(self.random.integers(0, 12))
        heapq.heappush(self._events, (self.time + delay, self._event_number, action))
        self._event_number += 1

    def run(self, launches: list[LaunchSpec]) -> None:
        """Runs launches; those of one stream in order."""
        if np.array([1e-40], np.float32).sum() == 0:
            raise EmulationError("this thread flushes subnormal numbers: run in another one")
        with np.errstate(all="ignore"):
            self._run(launches)

    def _run(self, launches: list[LaunchSpec]) -> None:
        self.queue = list(launches)
        if any(spec.overlaps_previous for spec in launches):
            self.order = LaunchOrder(self, len(launches))
        idle = 0
        self._start()
        while self.running or self.queue:
            before = self.progress
            for grid in list(self.running):
                grid.timeout = idle > 2
                grid.sweep(relief=idle > 0)
            self.time += 1
            self._deliver(everything=self.progress == before)
            self._retire()
            self._start()
            idle = idle + 1 if self.progress == before else 0
            if idle > self.patience:
                raise DeadlockError(waiting_report(self))
            if self.steps > self.max_steps:
                raise EmulationError(
                    f"{self.steps} blocks of code executed and no end: an endless loop?\n"
                    + waiting_report(self)
                )
        self._deliver(everything=True)

    def _deliver(self, everything: bool) -> None:
        while self._events and (everything or self._events[0][0] <= self.time):
            _, _, action = heapq.heappop(self._events)
            action()
            self.progress += 1
            everything = False

    def _retire(self) -> None:
        for grid in [g for g in self.running if g.finished]:
            self.running.remove(grid)
            lines = self.executed.setdefault(grid.code.entry.name, set())
            lines |= grid.visited_lines()
            self.progress += 1

    def _start(self) -> None:
        """Starts every launch and block that may start."""
        for spec in list(self.queue):
            last = self._last.get(spec.stream)
            earlier = [g for g in self.running if g.launch.stream == spec.stream]
            if last is not None and spec.overlaps_previous:
                ready = self._has_triggered(last)
            else:
                ready = not earlier
            if not ready or any(
                s.stream == spec.stream for s in self.queue[: self.queue.index(spec)]
            ):
                continue
            grid = Grid(spec.code, self, spec)
            self._previous[grid] = last if spec.overlaps_previous else None
            self._last[spec.stream] = grid
            if self.order is not None:
                self.order.start(grid, self._previous[grid])
            self.triggered[grid] = set()
            self.queue.remove(spec)
            self.running.append(grid)
            self.progress += 1
        for grid in self.running:
            grid.start_blocks(self.num_sms * self._blocks_per_sm(grid))

    def _blocks_per_sm(self, grid: Grid) -> int:
        """Resident blocks of a multiprocessor by threads and shared memory; registers unknown."""
        shared = grid.launch.total_shared + SharedMemory.RESERVED
        return max(1, min(2048 // grid.threads, 32, 228 * 1024 // shared))

    def _has_triggered(self, grid: Grid) -> bool:
        return grid.finished or len(self.triggered[grid]) == grid.num_blocks

    def blocks_exited(self, grid: Grid, blocks: np.ndarray) -> None:
        """Called when warps exit: a block that is gone counts as triggered."""
        gone = blocks[grid.live_warps[blocks] == 0]
        if self.order is not None:
            silent = np.setdiff1d(gone, list(self.triggered[grid]))
            self.order.trigger(grid, np.flatnonzero(np.isin(grid.block_of, silent)))
        self.triggered[grid].update(gone.tolist())
        for part in grid.parts.values():
            part.blocks_exited(gone)

    def trigger(self, grid: Grid, numbers: np.ndarray) -> None:
        """`griddepcontrol.launch_dependents` of some warps, for their blocks."""
        if self.order is not None:
            self.order.trigger(grid, numbers)
        self.triggered[grid].update(np.unique(grid.block_of[numbers]).tolist())
        self.progress += 1

    def clock(self, name: str) -> int:
        """`%clock`, `%clock64` or `%globaltimer`: a block of code takes a cycle, a sweep 1 us."""
        if name == "%clock_hi":
            return self.steps >> 32
        return self.time * 1000 if name.startswith("%globaltimer") else self.steps

    def previous_done(self, grid: Grid, numbers: np.ndarray) -> bool:
        """Whether `griddepcontrol.wait` of some warps may return."""
        previous = self._previous[grid]
        if previous in self.running:
            return False
        if self.order is not None:
            self.order.wait(grid, numbers, previous)
        return True
