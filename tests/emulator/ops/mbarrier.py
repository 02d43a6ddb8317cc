"""`mbarrier.*`."""

import numpy as np

from ..barriers import Mbarriers
from ..binding import Binder, Op, instruction
from ..instruction import SINK, Immediate
from .memory import take_space


class BarrierOperand:
    """Address of an mbarrier and how to find its store offset."""

    def __init__(self, b: Binder, operand):
        self.slot, bits, self.offset = b.address(operand)
        self.bits = bits

    def offsets(self, G, base) -> np.ndarray:
        """Offsets in the shared store, [warps, 32]."""
        address = G.wide(base).astype(np.uint64) + np.uint64(self.offset % (1 << 64))
        address &= np.uint64(0xFFFFFFFF)
        return G.grid.shared.offsets(address, G.rows(G.grid.first_block))


def lanes(G, mask, *values):
    """Values of the active lanes, flat, after the lanes' warps."""
    numbers = np.broadcast_to(G.numbers[:, None], (G.count, 32))
    wide = [numbers, *(G.wide(v) for v in values)]
    return [v.ravel() if mask is None else v[mask] for v in wide]


@instruction("mbarrier")
def mbarrier(b: Binder) -> Op:
    """Every mbarrier operation."""
    action = b.modifiers.pop(0)
    handler = _ACTIONS.get(action)
    if handler is None:
        raise b.unknown(f"mbarrier.{action} is not implemented")
    return handler(b)


def _init(b: Binder) -> Op:
    take_space(b)
    b.type("b64")
    where, count = b.operands
    target = BarrierOperand(b, where)
    srcs = [target.slot, b.src(count, 32)]

    def fn(G, mask, base, count):
        numbers, offset, count = lanes(G, mask, target.offsets(G, base), count)
        G.grid.part(Mbarriers).init(offset, count.astype(np.int64), numbers, b.ins)

    return b.effect(fn, [], srcs)


def _inval(b: Binder) -> Op:
    take_space(b)
    b.type("b64")
    target = BarrierOperand(b, b.operands[0])

    def fn(G, mask, base):
        numbers, offset = lanes(G, mask, target.offsets(G, base))
        G.grid.part(Mbarriers).invalidate(offset, numbers, b.ins)

    return b.effect(fn, [], [target.slot])


def _order(b: Binder) -> None:
    b.one_of("release", "acquire", "relaxed", default="")
    b.one_of("cta", "cluster", default="")


def _arrive(b: Binder) -> Op:
    expects, drops = b.flag("expect_tx"), b.flag("drop")
    b.flag("noComplete")
    _order(b)
    take_space(b)
    b.type("b64")
    if drops:
        raise b.unknown("mbarrier.arrive_drop is not implemented")
    operands = list(b.operands)
    has_state = len(operands) > 1 and not hasattr(operands[0], "base")
    state = operands.pop(0) if has_state else SINK
    target = BarrierOperand(b, operands.pop(0))
    extra = [b.src(o, 32) for o in operands]
    dst = b.dst(state, 64)

    def fn(G, mask, base, *values):
        values = values or (np.ones((1, 1), np.uint32),)
        numbers, offset, value = lanes(G, mask, target.offsets(G, base), values[0])
        barriers = G.grid.part(Mbarriers)
        value = value.astype(np.int64)
        count, expect = (1, value) if expects else (value, 0)
        index = barriers.find(offset, numbers, b.ins)
        _, which = np.nonzero(G.active(mask))
        before = barriers.arrive(index, count, expect, (numbers, which), b.ins)
        state = np.zeros((G.count, 32), np.uint64)
        state[G.active(mask)] = before
        return (state,)

    return b.effect(fn, [dst], [target.slot, *extra])


def _expect_tx(b: Binder) -> Op:
    _order(b)
    take_space(b)
    b.type("b64")
    where, count = b.operands
    target = BarrierOperand(b, where)
    srcs = [target.slot, b.src(count, 32)]

    def fn(G, mask, base, count):
        numbers, offset, count = lanes(G, mask, target.offsets(G, base), count)
        barriers = G.grid.part(Mbarriers)
        index = barriers.find(offset, numbers, b.ins)
        barriers.arrive(index, 0, count.astype(np.int64), None, b.ins)

    return b.effect(fn, [], srcs)


def _wait(b: Binder, blocking: bool) -> Op:
    """try_wait, where lanes wait for a while, and test_wait, where they do not."""
    parity = b.flag("parity")
    _order(b)
    take_space(b)
    b.type("b64")
    d, where, state, *hint = b.operands
    target = BarrierOperand(b, where)
    bits = 32 if parity else 64
    state_slot = b.src(state, bits)
    if hint and not isinstance(hint[0], Immediate):
        b.src(hint[0], 32)
    dst = b.dst(d, 1)

    def look(G, mask, base, state):
        """Phase completed, per lane."""
        numbers, offset, state = lanes(G, mask, target.offsets(G, base), state)
        barriers = G.grid.part(Mbarriers)
        index = barriers.find(offset, numbers, b.ins)
        phase = barriers.phase[index]
        wanted = state.astype(np.int64)
        done = ((phase & 1) != (wanted & 1)) if parity else phase > wanted
        barriers.acquire(numbers[done], index[done])
        result = np.zeros((G.count, 32), bool)
        result[G.active(mask)] = done
        return result

    if not blocking or b.ins.guard is not None:
        fn = lambda G, mask, base, state: (look(G, mask, base, state),)  # noqa: E731
        return b.effect(fn, [dst], [target.slot, state_slot], poll=True)

    def wait(R, G):
        done = look(G, G.mask, R[target.slot], R[state_slot])
        R[dst] = done
        return None if G.grid.timeout else done

    def describe(grid, row, value):
        address = np.array([[(value(target.slot) + target.offset) & 0xFFFFFFFF]], np.uint64)
        offset = grid.shared.offsets(address, grid.first_block[row : row + 1])
        what = grid.part(Mbarriers).describe(int(offset[0, 0]))
        return f"{'parity' if parity else 'state'} {value(state_slot)} of {what}"

    return b.op(wait, effect=True, poll=True, waits=True, describe=describe)


_ACTIONS = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "expect_tx": _expect_tx,
    "try_wait": lambda b: _wait(b, True),
    "test_wait": lambda b: _wait(b, False),
}
