"""Who waits for what: the report of a hang."""

import numpy as np

from .flow import END


def waiting_report(device) -> str:
    """Lists the places where lanes of unfinished launches stand."""
    lines = ["no warp can go on:"]
    for grid in device.running:
        name = grid.code.entry.name
        places = np.unique(grid.pc[grid.pc != END])
        lines.append(f" {name}: {int((grid.live_warps > 0).sum())} blocks unfinished")
        for place in places.tolist():
            lines.append("  " + _place(grid, place))
    for spec in device.queue:
        lines.append(f" {spec.code.entry.name}: not started, waits for the launch before it")
    return "\n".join(lines)


def _place(grid, place: int) -> str:
    block = grid.code.blocks[place]
    rows, lanes = np.nonzero(grid.pc == place)
    row, lane = int(rows[0]), int(lanes[0])
    warps = np.unique(rows)
    who = (
        f"{len(warps)} warps ({len(rows)} lanes) stand at {block.first.where}\n"
        f"    first: block {grid.block_of[row]}, warp {grid.warp_in_block[row]}, lane {lane}"
    )
    op = block.operations[0] if block.operations else None
    if op is not None and op.describe is not None:
        R = {slot: grid.slots[slot] for slot in block.loads if grid.slots[slot] is not None}
        value = lambda slot: int(_at(R.get(slot, grid.template[slot]), row, lane))  # noqa: E731
        who += f"\n    waits for {op.describe(grid, row, value)}"
    elif block.sync is not None:
        live = grid.pc[row] != END
        missing = np.flatnonzero(live & (grid.pc[row] != place)).tolist()
        who += f"\n    waits for lanes {missing} of its warp"
    return who


def _at(values: np.ndarray, row: int, lane: int):
    return np.broadcast_to(values, (max(values.shape[0], row + 1), 32))[row, lane]
