"""Values loaded from memory that nothing wrote, followed until they matter.

A kernel may load bytes it does not need, so a load of undefined bytes is no error by itself. Its
lanes are marked, the marks follow the data through registers, shuffles, matrix instructions and
memory, and an error comes when a branch, an address, a guard or a barrier depends on one. Blocks
of code run without any of this as long as no value is undefined.
"""

import numpy as np

from .errors import UninitialisedError
from .types import LANES


def run_marked(block, R, group, marks: dict[int, np.ndarray], start: int, ready=None):
    """Runs the operations of a block from `start` on, carrying marks along.

    Args:
        block: the block of code.
        R: its slots.
        group: the warps.
        marks: undefined lanes of each slot; changed in place.
        start: first operation; the one before it may have left marks in `group.undefined`.
        ready: result of the operation before.
    """
    if start:
        _after(block.operations[start - 1], group, marks, {})
    for op in block.operations[start:]:
        dirty = {slot: marks[slot] for slot in op.uses if slot in marks}
        if dirty and op.effect and not op.stored:
            _refuse(op, group, dirty, op.uses)
        if dirty and (op.stored or op.addresses):
            _refuse(op, group, dirty, [s for s in op.uses if s not in op.stored])
        group.undefined = None
        if group.grid.in_flight is not None:
            group.grid.in_flight.check(op, group)
        group.storing = _stacked(op.stored, marks, group) if op.stored else None
        ready = op.run(R, group)
        _after(op, group, marks, dirty, R)
    group.storing = None
    if block.branch is not None:
        dirty = {slot: marks[slot] for slot in block.branch.uses if slot in marks}
        _refuse(block.branch, group, dirty, block.branch.uses)
    return ready


def _after(op, group, marks, dirty, R=None) -> None:
    """Marks what an operation wrote."""
    if dirty and op.mark is not None:
        clean = np.zeros((group.count, LANES), bool)
        flags = op.mark(R, group, [marks.get(slot, clean) for slot in op.sources])
    else:
        flags = [_union(dirty, group)] * len(op.results)
    if group.undefined is not None:
        loaded = [group.undefined[..., i] for i in range(group.undefined.shape[-1])]
        flags = [a if b is None else a | b for a, b in zip(loaded, flags, strict=True)]
        group.undefined = None
    for slot, flag in zip(op.results, flags, strict=True):
        if flag is not None and flag.any():
            marks[slot] = flag
        else:
            marks.pop(slot, None)


def _union(dirty, group):
    if not dirty:
        return None
    union = np.zeros((group.count, LANES), bool)
    for flags in dirty.values():
        union = union | flags
    return union


def _stacked(slots, marks, group):
    """Marks of the values that a store writes, [warps, 32, values], or None."""
    if not any(slot in marks for slot in slots):
        return None
    clean = np.zeros((group.count, LANES), bool)
    return np.stack([np.broadcast_to(marks.get(s, clean), clean.shape) for s in slots], axis=-1)


def _refuse(op, group, dirty, slots) -> None:
    """Raises if an active lane's value in one of `slots` is undefined."""
    active = group.active(group.mask)
    for slot in slots:
        if slot in dirty and (dirty[slot] & active).any():
            row, lane = np.argwhere(dirty[slot] & active)[0].tolist()
            number = group.numbers[row]
            grid = group.grid
            raise UninitialisedError(
                f"block {grid.block_of[number]}, warp {grid.warp_in_block[number]}, lane {lane} "
                f"depends on a value from memory that nothing wrote "
                f"(last loaded at {grid.device.undefined_load})",
                op.instruction,
            )
