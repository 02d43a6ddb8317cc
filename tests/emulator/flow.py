"""A kernel as basic blocks of bound operations, with liveness and spin loops found.

Blocks are cut finer than usual: an operation where lanes may have to wait stands alone, and one
that needs a converged warp stands first among operations with effects. So lanes only ever stop
between blocks, and values that live inside one block need no storage.
"""

from dataclasses import dataclass, field

from .binding import Branch, Op, Slots, bind
from .errors import BarrierError, PtxSyntaxError, UnknownInstructionError
from .instruction import Entry, Module

END = 1 << 30
"""The program counter of a lane that exited."""


@dataclass
class Block:
    """Operations that always run together.

    Attributes:
        operations: in order, the closing branch excluded.
        branch: the closing branch, or None to fall through.
        targets: block numbers of `branch.targets`.
        sync: "all", a member-mask slot, or None (see `Op.sync`).
        loads, stores: register slots fetched before and kept after.
        spins: a branch back to an earlier block closes a loop that polls.
    """

    operations: list[Op] = field(default_factory=list)
    branch: Op | None = None
    targets: tuple[int, ...] = ()
    sync: object = None
    loads: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    spins: bool = False

    @property
    def waits(self) -> bool:
        return bool(self.operations) and self.operations[0].waits

    @property
    def first(self):
        """The instruction a lane that stands before this block will execute next."""
        op = self.operations[0] if self.operations else self.branch
        return op.instruction if op else None


@dataclass
class Code:
    """A kernel ready to run."""

    entry: Entry
    module: Module
    slots: Slots
    blocks: list[Block]


def compile_entry(module: Module, name: str | None = None) -> Code:
    """Binds and cuts one kernel of a module."""
    if name is None and len(module.entries) == 1:
        name = next(iter(module.entries))
    if name not in module.entries:
        raise PtxSyntaxError(f"no kernel {name!r}; the module has {sorted(module.entries)}")
    entry = module.entries[name]
    variables = {**module.variables, **entry.variables}
    slots = Slots({p.name: p.num_bytes for p in entry.parameters}, variables, module.target)
    blocks = _cut(entry, slots)
    _liveness(blocks, slots)
    _spins(blocks)
    if any(ins.opcode == "wgmma" for ins in entry.instructions):
        _check_fences(blocks)
    return Code(entry, module, slots, blocks)


def _cut(entry: Entry, slots: Slots) -> list[Block]:
    starts: dict[int, list[str]] = {}
    for label, index in entry.labels.items():
        starts.setdefault(index, []).append(label)
    blocks = [Block()]
    where: dict[str, int] = {}
    for index, ins in enumerate(entry.instructions):
        if index in starts:
            if blocks[-1].operations or blocks[-1].branch:
                blocks.append(Block())
            where.update(dict.fromkeys(starts[index], len(blocks) - 1))
        op = bind(ins, slots)
        for part in (*op.before, op):
            _append(blocks, part)
    for label in starts.get(len(entry.instructions), ()):
        where[label] = END
    if blocks[-1].branch is None and not blocks[-1].operations:
        blocks.pop()
    for block in blocks:
        if block.branch:
            block.targets = tuple(
                _target(where, t, block.branch) for t in _labels(block.branch, entry)
            )
    return blocks


def _target(where: dict[str, int], label: str, op: Op) -> int:
    if label not in where:
        raise PtxSyntaxError(f"label {label!r} is not defined", op.instruction)
    return where[label]


def _labels(op: Op, entry: Entry) -> list[str]:
    branch = op.branch
    if branch.index is None:
        return list(branch.targets)
    (table,) = branch.targets
    if table not in entry.branch_targets:
        raise UnknownInstructionError(f"no .branchtargets {table!r}", op.instruction)
    return entry.branch_targets[table]


def _append(blocks: list[Block], op: Op) -> None:
    block = blocks[-1]
    if block.branch or block.waits or (op.waits and block.operations):
        blocks.append(block := Block())
    if op.sync is not None and block.sync != "all":
        constant_all = op.sync == "all"
        moved = any(o.effect for o in block.operations)
        if block.operations and (moved or not constant_all or block.sync is not None):
            blocks.append(block := Block())
        block.sync = op.sync
    if op.branch:
        block.branch = op
    else:
        block.operations.append(op)


def _liveness(blocks: list[Block], slots: Slots) -> None:
    persistent = 0
    for slot in slots.registers.values():
        persistent |= 1 << slot
    uses, defs = [], []
    for block in blocks:
        used = defined = 0
        if isinstance(block.sync, int):
            used |= 1 << block.sync
        for op in (*block.operations, *([block.branch] if block.branch else [])):
            for slot in op.uses:
                if not defined >> slot & 1:
                    used |= 1 << slot
            for slot in op.defs:
                defined |= 1 << slot
        uses.append(used)
        defs.append(defined)
    after = [0] * len(blocks)
    before = list(uses)
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            out = 0
            for target in _successors(blocks, i):
                out |= before[target]
            if out != after[i]:
                after[i] = out
                before[i] = uses[i] | (out & ~defs[i])
                changed = True
    for block, used, defined, out in zip(blocks, uses, defs, after, strict=True):
        block.loads = _members(used)
        block.stores = _members(defined & out & persistent)


def _successors(blocks: list[Block], i: int) -> list[int]:
    block = blocks[i]
    targets = [t for t in block.targets if t != END]
    falls = block.branch is None or (
        block.branch.instruction.guard is not None and block.branch.branch.index is None
    )
    if falls and i + 1 < len(blocks):
        targets.append(i + 1)
    return targets


def _members(bits: int) -> tuple[int, ...]:
    members = []
    while bits:
        low = bits & -bits
        members.append(low.bit_length() - 1)
        bits ^= low
    return tuple(members)


def _spins(blocks: list[Block]) -> None:
    """Marks branches back over a range of blocks in which an operation polls."""
    polls = [any(op.poll for op in block.operations) for block in blocks]
    for i, block in enumerate(blocks):
        block.spins = any(t <= i and any(polls[t : i + 1]) for t in block.targets)


def _check_fences(blocks: list[Block]) -> None:
    """Refuses wgmma on registers that something else wrote since the last `wgmma.fence`.

    Which registers those are is carried along all paths; before the first fence it is all.
    """
    everything = -1
    unfenced: list[int] = [everything] + [0] * (len(blocks) - 1)
    pending = set(range(len(blocks)))
    while pending:
        i = min(pending)
        pending.discard(i)
        state = unfenced[i]
        for op in blocks[i].operations:
            state = _after_fences(op, state)
        for target in _successors(blocks, i):
            if state & ~unfenced[target]:
                unfenced[target] |= state
                pending.add(target)
    for block, state in zip(blocks, unfenced, strict=True):
        for op in block.operations:
            if "mma_async" in op.instruction.modifiers and state & op.register_bits:
                raise BarrierError(
                    "registers of wgmma were written with no wgmma.fence since", op.instruction
                )
            state = _after_fences(op, state)


def _after_fences(op: Op, state: int) -> int:
    if op.instruction.opcode == "wgmma":
        return 0 if "fence" in op.instruction.modifiers else state & ~_bits(op.defs)
    return state | _bits(op.defs)


def _bits(slots) -> int:
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits


__all__ = ["END", "Block", "Branch", "Code", "compile_entry"]
