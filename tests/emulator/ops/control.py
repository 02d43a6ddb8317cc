"""Branches, exit, trap."""

from ..binding import Binder, Branch, Op, instruction
from ..errors import TrapError
from ..instruction import Symbol


def _guard(b: Binder):
    """A function giving the lanes whose guard holds; None for an unguarded instruction."""
    if b.ins.guard is None:
        return lambda R, G: None
    slot = b.guard_slot()
    return (lambda R, G: ~R[slot]) if b.ins.negate else (lambda R, G: R[slot])


@instruction("bra")
def bra(b: Binder) -> Op:
    """Branch."""
    b.flag("uni")
    (target,) = b.operands
    if not isinstance(target, Symbol):
        raise b.unknown("the target is not a label")
    return b.op(_guard(b), branch=Branch((target.name,)))


@instruction("brx")
def brx(b: Binder) -> Op:
    """Branch through a table of labels."""
    b.one_of("idx")
    b.flag("uni")
    index, table = b.operands
    slot = b.src(index, 32)
    return b.op(_guard(b), branch=Branch((table.name,), index=slot))


@instruction("ret", "exit")
def leave(b: Binder) -> Op:
    """End of the lane."""
    b.flag("uni")
    return b.op(_guard(b), branch=Branch(exits=True))


@instruction("trap")
def trap(b: Binder) -> Op:
    """Ends the launch with an error."""

    def fn(G, mask):
        row = int(G.active(mask).any(axis=1).argmax())
        number = G.numbers[row]
        raise TrapError(
            f"trap executed by block {G.grid.block_of[number]}, "
            f"warp {G.grid.warp_in_block[number]}",
            b.ins,
        )

    return b.effect(fn, [], [])
