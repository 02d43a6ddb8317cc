"""One launch in execution: registers and program counters of all its warps, and the sweep.

Scheduling. In a sweep every warp runs until it waits, exits or closes a spin loop. Within a warp
the lanes with the smallest program counter go first, which reconverges them as the hardware's
compiler-placed barriers do; lanes of a warp that are ahead are held back while others of it spin,
and released only when nothing else in the device moves. All warps of the grid that stand at the
same block of code run together as one wide vector.
"""

import numpy as np

from .binding import Op
from .errors import BarrierError, EmulationError
from .flow import END, Block, Code
from .group import Group
from .memory import LocalMemory, SharedMemory
from .races import Races
from .specials import special_values, unravel
from .types import LANES, RAW
from .undefined import run_marked
from .warpgroups import Warpgroups

FAR = np.int32(END)
POISON = 0xDEADBEEFDEADBEEF
"""What a register holds before its first write."""


class Grid:
    """State of one launch."""

    EXITED = FAR

    def __init__(self, code: Code, device, launch):
        self.code, self.device, self.launch = code, device, launch
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.num_blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        self.cluster_size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        self.warps_per_block = -(-self.threads // LANES)
        count = self.num_warps = self.num_blocks * self.warps_per_block
        self.block_of = np.repeat(np.arange(self.num_blocks), self.warps_per_block)
        self.warp_in_block = np.tile(np.arange(self.warps_per_block), self.num_blocks)
        self.block_coordinates = self._coordinates()
        first = self.block_of // self.cluster_size * self.cluster_size
        self.first_block = first.astype(np.uint64)[:, None]
        self.pc = np.full((count, LANES), FAR, np.int32)
        self.parked = np.zeros((count, LANES), bool)
        self.yielded = np.zeros((count, LANES), bool)
        self.current = np.full(count, FAR, np.int32)
        self.live_warps = np.full(self.num_blocks, self.warps_per_block)
        self.started = 0
        self.timeout = False
        self.visited: set[int] = set()
        self.slots: list[np.ndarray | None] = [None] * code.slots.count
        self.shared = SharedMemory(self.num_blocks, launch.total_shared, self.cluster_size)
        self.local = LocalMemory(self.num_warps, launch.local_bytes)
        self.races = Races(self)
        self.template: list[np.ndarray | None] = [None] * code.slots.count
        self.parts: dict[str, object] = {}
        self.marks: dict[int, np.ndarray] = {}
        self.in_flight: Warpgroups | None = None
        self._fill_slots()

    def part(self, kind):
        """State that an instruction family keeps for this launch, made on first use."""
        name = kind.__name__
        if name not in self.parts:
            self.parts[name] = kind(self)
            if kind is Warpgroups:
                self.in_flight = self.parts[name]
        return self.parts[name]

    def _coordinates(self) -> list[np.ndarray]:
        """ctaid of every warp; the blocks of a cluster are numbered consecutively."""
        launch = self.launch
        extents = [g // c for g, c in zip(launch.grid, launch.cluster, strict=True)]
        cluster = unravel(self.block_of // self.cluster_size, extents)
        rank = unravel(self.block_of % self.cluster_size, launch.cluster)
        return [c * n + r for c, n, r in zip(cluster, launch.cluster, rank, strict=True)]

    def _fill_slots(self) -> None:
        slots = self.code.slots
        for slot, value in slots.constants.items():
            self.template[slot] = value
        for slot, (name, offset, bits) in slots.parameters.items():
            raw = self.launch.parameter_bytes[name][offset : offset + bits // 8]
            self.template[slot] = np.frombuffer(raw, RAW[bits]).reshape(1, 1).copy()
        for slot, name in slots.specials.items():
            values = special_values(self, name, slots.bits[slot])
            if values.shape == (1, 1):
                self.template[slot] = values
            else:
                self.slots[slot] = values
        for slot in slots.registers.values():
            dtype = RAW[slots.bits[slot]]
            poison = POISON % (1 << min(slots.bits[slot], 64))
            self.slots[slot] = np.full((self.num_warps, LANES), poison, dtype)

    def start_blocks(self, resident: int) -> None:
        """Makes the next blocks runnable, so that at most `resident` unfinished ones run."""
        running = int((self.live_warps[: self.started] > 0).sum())
        limit = min(self.started + resident - running, self.num_blocks)
        limit = limit // self.cluster_size * self.cluster_size
        if limit <= self.started:
            return
        lanes = np.arange(LANES)[None] + self.warp_in_block[:, None] * LANES < self.threads
        new = (self.block_of >= self.started) & (self.block_of < limit)
        self.pc[new[:, None] & lanes] = 0
        self.started = limit
        self.current[new] = 0
        self.device.progress += 1

    @property
    def finished(self) -> bool:
        return self.started == self.num_blocks and not self.live_warps.any()

    def visited_lines(self) -> set[int]:
        """PTX lines that some lane executed, guards aside."""
        blocks = [self.code.blocks[pc] for pc in self.visited]
        ops = [op for b in blocks for op in (*b.operations, *([b.branch] if b.branch else []))]
        return {op.instruction.line for op in ops}

    # The sweep.

    def sweep(self, relief: bool) -> None:
        """Runs every warp once until it waits, exits or spins.

        Args:
            relief: also run lanes that are ahead of spinning lanes of their warp.
        """
        held = self.yielded if relief else None
        self._refresh(held)
        self.yielded[:] = False
        budget = self.device.steps_per_sweep
        while budget:
            pc = self._pick()
            if pc == FAR:
                return
            self._step(pc)
            budget -= 1

    def _refresh(self, held) -> None:
        """Unparks lanes and finds every warp's next block."""
        self.parked[:] = False
        pc = self.pc if held is None else np.where(held, FAR, self.pc)
        self.current = pc.min(axis=1)
        alone = self.current == FAR
        if held is not None and alone.any():
            self.current = np.where(alone, self.pc.min(axis=1), self.current)

    def _pick(self) -> int:
        rng = self.device.random
        if rng is None:
            return int(self.current.min())
        choices = np.unique(self.current)
        choices = choices[choices != FAR]
        return int(rng.choice(choices)) if choices.size else int(FAR)

    def _members(self, pc: int):
        numbers = np.flatnonzero(self.current == pc)
        rng = self.device.random
        if rng is not None and numbers.size > 1 and rng.random() < 0.5:
            numbers = np.sort(rng.choice(numbers, rng.integers(1, numbers.size + 1), False))
        return numbers

    def _step(self, pc: int) -> None:
        """Runs one block of code for the warps whose turn it is there."""
        numbers = self._members(pc)
        block = self.code.blocks[pc]
        mask = self.pc[numbers] == pc
        if block.sync is not None:
            numbers, mask = self._converged(block, numbers, mask)
            if not numbers.size:
                return
        else:
            mask &= ~self.parked[numbers]
        first, last = int(numbers[0]), int(numbers[-1])
        contiguous = last - first + 1 == numbers.size
        warps = slice(first, last + 1) if contiguous else numbers
        group = Group(self, warps, numbers, None if mask.all() else mask)
        self.visited.add(pc)
        R = self._fetch(block, warps)
        ready, marks = self._execute(block, R, group)
        if block.waits and ready is not None:
            mask = self._park(numbers, mask, group.wide(ready))
            group.mask = None if mask.all() else mask
        self._keep(block, R, group, mask)
        if marks is not None or self.marks:
            self._keep_marks(block, marks or {}, group, mask)
        self._jump(pc, block, R, group, mask)
        self.device.steps += 1

    def _fetch(self, block: Block, warps) -> list:
        """The slots that a block works on, its inputs filled in."""
        R = self.template.copy()
        for slot in block.loads:
            stored = self.slots[slot]
            if stored is not None:
                R[slot] = stored[warps]
        return R

    def _execute(self, block: Block, R: list, group: Group):
        """Runs the operations; what the last one returned, and the undefined lanes of slots."""
        marks = self._marks(block, group.warps) if self.marks else None
        ready = op = None
        try:
            if marks:
                return run_marked(block, R, group, marks, 0), marks
            for i, op in enumerate(block.operations):
                if self.in_flight is not None:
                    self.in_flight.check(op, group)
                ready = op.run(R, group)
                if group.undefined is not None:
                    marks = {}
                    return run_marked(block, R, group, marks, i + 1, ready), marks
        except EmulationError:
            raise
        except Exception as error:
            raise EmulationError(f"internal: {error!r}", op and op.instruction) from error
        return ready, marks

    def _converged(self, block, numbers, mask):
        """The warps whose lanes have all arrived; the others' lanes are parked."""
        live = self.pc[numbers] != FAR
        if block.sync == "all":
            wanted = live
        else:
            members = self.slots[block.sync]
            members = self.code.slots.constants.get(block.sync, members)
            members = members if members.shape == (1, 1) else members[numbers]
            lanes = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
            outside = mask & ((members & lanes) == 0)
            if outside.any():
                raise BarrierError(
                    f"a lane executes it that its member mask "
                    f"{int(np.broadcast_to(members, mask.shape)[outside][0]):#x} leaves out",
                    block.first,
                )
            named = np.broadcast_to(members, mask.shape)
            union = np.bitwise_or.reduce(np.where(mask, named, 0), axis=1, keepdims=True)
            wanted = live & ((union & lanes) != 0)
        complete = (wanted <= mask).all(axis=1)
        if complete.all():
            self.parked[numbers] &= ~mask
            return numbers, mask
        self._set_parked(numbers[~complete], mask[~complete])
        numbers, mask = numbers[complete], mask[complete]
        self.parked[numbers] &= ~mask
        return numbers, mask

    def _park(self, numbers, mask, ready):
        stay = mask & ~ready
        if stay.any():
            rows = stay.any(axis=1)
            self._set_parked(numbers[rows], stay[rows])
        return mask & ready

    def _set_parked(self, numbers, lanes) -> None:
        self.parked[numbers] |= lanes
        self._find_current(numbers)

    def _find_current(self, numbers) -> None:
        """Finds the next block of some warps, from their lanes that neither wait nor spin."""
        pc = self.pc[numbers]
        stopped = self.yielded[numbers]
        spinning = stopped.any(axis=1)
        free = np.where(self.parked[numbers] | spinning[:, None], FAR, pc)
        self.current[numbers] = free.min(axis=1)

    def _keep(self, block, R, group, mask) -> None:
        full = group.mask is None
        for slot in block.stores:
            value = R[slot]
            stored = self.slots[slot]
            if full:
                if group.count == self.num_warps and value.shape == stored.shape:
                    self.slots[slot] = np.array(value) if value is stored else value
                else:
                    stored[group.warps] = value
            else:
                stored[group.warps] = np.where(mask, value, stored[group.warps])

    def _marks(self, block, warps) -> dict[int, np.ndarray]:
        """Undefined lanes of the slots that a block loads."""
        found = {slot: self.marks[slot][warps] for slot in block.loads if slot in self.marks}
        return {slot: flags for slot, flags in found.items() if flags.any()}

    def _keep_marks(self, block, marks, group, mask) -> None:
        for slot in block.stores:
            if slot not in marks and slot not in self.marks:
                continue
            kept = self.marks.setdefault(slot, np.zeros((self.num_warps, LANES), bool))
            kept[group.warps] = np.where(mask, marks.get(slot, False), kept[group.warps])
            if not kept.any():
                del self.marks[slot]

    def _jump(self, pc: int, block: Block, R, group: Group, mask) -> None:
        """Moves the lanes on: through the closing branch or to the next block."""
        numbers = group.numbers
        after = pc + 1 if pc + 1 < len(self.code.blocks) else END
        goes, targets = None, after
        if block.branch is not None:
            goes, targets = _taken(block.branch, block.targets, R, group)
        if group.mask is None and isinstance(targets, int):
            if goes is None or goes.all():
                return self._move_all(numbers, pc, targets, block)
            if not goes.any():
                return self._move_all(numbers, pc, after, block)
        where = targets if goes is None else np.where(goes, targets, after)
        self.pc[numbers] = new = np.where(mask, where, self.pc[numbers]).astype(np.int32)
        if block.spins:
            self.yielded[numbers] |= mask & (new <= pc)
        if (new == FAR).any():
            self._count_exits(numbers, new)
        return self._find_current(numbers)

    def _move_all(self, numbers, pc: int, to: int, block) -> None:
        self.pc[numbers] = to
        if to == END:
            self._count_exits(numbers, self.pc[numbers])
            self.current[numbers] = FAR
        elif block.spins and to <= pc:
            self.yielded[numbers] = True
            self.current[numbers] = FAR
        else:
            self.current[numbers] = to

    def _count_exits(self, numbers, pc) -> None:
        gone = numbers[(pc == FAR).all(axis=1)]
        if gone.size:
            np.subtract.at(self.live_warps, self.block_of[gone], 1)
            self.device.progress += 1
            self.device.blocks_exited(self, np.unique(self.block_of[gone]))


def _taken(op: Op, targets: tuple[int, ...], R, group):
    """Lanes that branch (None for all) and where to: a block, or blocks per lane."""
    goes = op.run(R, group)
    if op.branch.exits:
        return goes, END
    if op.branch.index is not None:
        return goes, np.array(targets, np.int32)[group.wide(R[op.branch.index])]
    return goes, targets[0]
