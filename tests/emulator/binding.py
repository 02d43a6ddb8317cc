"""From a parsed instruction to an operation on arrays: operand slots, modifiers, guards.

A handler, registered with `@instruction`, receives a `Binder`, takes every modifier it knows and
returns an `Op`. Whatever it does not take is an error, so an unknown modifier can never be ignored.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import UnknownInstructionError
from .instruction import SINK, Address, Immediate, Instruction, Negated, Register, Symbol, Vector
from .specials import is_special
from .types import RAW, REGISTER_BITS, TYPES, PtxType

SPECIAL_BITS = {
    "%clock64": 64,
    "%globaltimer": 64,
    "%gridid": 64,
    "%is_explicit_cluster": 1,
}
"""Special registers that are not 32 bits wide."""


class Slots:
    """Numbers every value a kernel names: registers, constants, parameters, special registers."""

    def __init__(self, parameters: dict[str, int], variables: Collection[str], target: str):
        self.target = target
        self.count = 0
        self.bits: list[int] = []
        self.registers: dict[str, int] = {}
        self.constants: dict[int, np.ndarray] = {}
        self.parameters: dict[int, tuple[str, int, int]] = {}
        self.specials: dict[int, str] = {}
        self.parameter_bytes = parameters
        self.variables = variables
        self._known: dict[Any, int] = {}

    def new(self, bits: int, key: Any = None) -> int:
        """A slot of its own, or the one that `key` already has."""
        if key is not None and key in self._known:
            return self._known[key]
        self.bits.append(bits)
        self.count += 1
        if key is not None:
            self._known[key] = self.count - 1
        return self.count - 1

    def register(self, register: Register) -> int:
        slot = self.new(REGISTER_BITS[register.type], register.name)
        self.registers[register.name] = slot
        return slot

    def hidden(self, bits: int, name: str) -> int:
        """A register that PTX does not name, such as the phase a barrier wait waits for."""
        slot = self.new(bits)
        self.registers[f"{name}#{slot}"] = slot
        return slot

    def constant(self, value: int, bits: int) -> int:
        value %= 1 << bits
        slot = self.new(bits, ("constant", value, bits))
        self.constants[slot] = np.full((1, 1), value, RAW[bits])
        return slot

    def parameter(self, name: str, offset: int, bits: int) -> int:
        slot = self.new(bits, ("parameter", name, offset, bits))
        self.parameters[slot] = (name, offset, bits)
        return slot

    def special(self, name: str, bits: int) -> int:
        slot = self.new(bits, (name, bits))
        self.specials[slot] = name
        return slot


@dataclass
class Op:
    """A bound instruction.

    Attributes:
        run: `run(R, G)` with the slot list and the group of warps; for a waiting operation it
            returns the mask of lanes that may go on, or None for all.
        uses, defs: register slots read and written.
        effect: touches more than registers, so nothing may move across it.
        poll: another thread may change its result, so a loop around it is a spin wait.
        sync: None, "all" (every live lane of the warp must arrive) or the slot of a member mask.
        waits: lanes may have to stay here; it stands alone in its block.
        describe: for a waiting operation, what a lane waits for: `describe(R, G, row, lane)`.
    """

    instruction: Instruction
    run: Callable[[list, Any], Any]
    uses: tuple[int, ...]
    defs: tuple[int, ...]
    effect: bool = False
    poll: bool = False
    sync: Any = None
    waits: bool = False
    describe: Callable[..., str] | None = None
    branch: "Branch | None" = None
    before: "list[Op]" = field(default_factory=list)
    """Operations to run before this one: the arriving half of an arrive-and-wait."""
    results: tuple[int, ...] = ()
    """Slots written, sinks included, in the order of the values."""
    sources: tuple[int, ...] = ()
    """Slots of the values that `mark` is given marks for."""
    stored: tuple[int, ...] = ()
    """Slots of the values that a store writes to memory; undefined ones may be stored."""
    addresses: bool = False
    """A load: its sources say where, so they must be defined."""
    use_bits: int = 0
    """`uses` as a bit set."""
    register_bits: int = 0
    """For wgmma: accumulators and rows in registers, as a bit set."""
    mark: Callable[..., Any] | None = None
    """`mark(R, G, flags of sources)`: undefined lanes of the results, where the union of the
    sources' flags would be too much."""


@dataclass
class Branch:
    """How control leaves: `targets` are labels; with an `index` slot, the table it indexes."""

    targets: tuple[str, ...] = ()
    exits: bool = False
    index: int | None = None


HANDLERS: dict[str, Callable[["Binder"], Op]] = {}


def instruction(*opcodes: str):
    """Registers the handler of some opcodes."""

    def register(handler):
        for opcode in opcodes:
            if opcode in HANDLERS:
                raise ValueError(f"two handlers for {opcode}")
            HANDLERS[opcode] = handler
        return handler

    return register


def bind(ins: Instruction, slots: Slots) -> Op:
    """Binds one instruction or raises UnknownInstructionError."""
    handler = HANDLERS.get(ins.opcode)
    if handler is None:
        raise UnknownInstructionError(f"instruction {ins.opcode!r} is not implemented", ins)
    binder = Binder(ins, slots)
    op = handler(binder)
    if binder.modifiers:
        raise binder.unknown()
    return op


class Binder:
    """What a handler sees of its instruction."""

    def __init__(self, ins: Instruction, slots: Slots):
        self.ins = ins
        self.slots = slots
        self.operands = list(ins.operands)
        self.modifiers = list(ins.modifiers)
        self.uses: list[int] = []
        self.defs: list[int] = []

    def unknown(self, what: str | None = None) -> UnknownInstructionError:
        what = what or f"modifiers {['.' + m for m in self.modifiers]} are not implemented"
        return UnknownInstructionError(what, self.ins)

    def require(self, *targets: str) -> None:
        """The instruction exists on these targets only, "sm_100" standing for its variants."""
        have = self.slots.target.rstrip("af")
        if have not in targets:
            raise self.unknown(f"needs {' or '.join(targets)}, the module is for {have}")

    # Modifiers.

    def flag(self, name: str) -> bool:
        """Whether the modifier stands there; takes it."""
        if name in self.modifiers:
            self.modifiers.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Takes the first of `names` that stands there."""
        for name in self.modifiers:
            if name in names:
                self.modifiers.remove(name)
                return name
        if default is None:
            raise self.unknown(f"needs one of {names}")
        return default

    def type(self, *allowed: str) -> PtxType:
        """Takes the last modifier as a type."""
        name = self.modifiers.pop() if self.modifiers else ""
        if name not in TYPES or (allowed and name not in allowed):
            self.modifiers.append(name)
            raise self.unknown(f"type {name!r} is not implemented here")
        return TYPES[name]

    def prefixed(self, prefix: str) -> str | None:
        """Takes the modifier that starts with `prefix`."""
        for name in self.modifiers:
            if name.startswith(prefix):
                self.modifiers.remove(name)
                return name
        return None

    # Operands.

    def src(self, operand, bits: int, kind: str = "b") -> int:
        """The slot of a source; immediates take the width and kind of the instruction's type."""
        if isinstance(operand, Register):
            slot = self.slots.register(operand)
            have = self.slots.bits[slot]
            if have != bits and not (bits == 8 and have >= 8):
                raise self.unknown(f"{operand.name} has {have} bits where {bits} are wanted")
            self.uses.append(slot)
            return slot
        if isinstance(operand, Immediate):
            return self.slots.constant(self.immediate_bits(operand, bits, kind), bits)
        if isinstance(operand, Symbol):
            return self.symbol(operand, bits)
        raise self.unknown(f"operand {operand} cannot be a source here")

    def immediate_bits(self, operand: Immediate, bits: int, kind: str) -> int:
        if operand.float_bits == 64 and bits in (16, 32) and kind == "f":
            value = np.uint64(operand.value).view(np.float64)
            narrow = {16: np.float16, 32: np.float32}[bits](value)
            return int(narrow.view(RAW[bits]))
        if not operand.float_bits and kind == "f":
            raise self.unknown("an integer literal where a floating-point value is wanted")
        return operand.value

    def symbol(self, operand: Symbol, bits: int) -> int:
        name = operand.name
        if name == "WARP_SZ":
            return self.slots.constant(32, bits)
        special = is_special(name)
        if special and SPECIAL_BITS.get(name, 32) != bits:
            raise self.unknown(f"special register {name} read as {bits} bits")
        if special or name in self.slots.variables:
            slot = self.slots.special(name, bits)
            self.uses.append(slot)
            return slot
        raise self.unknown(f"symbol {name!r} is not known")

    def predicate(self, operand) -> tuple[int, bool]:
        """Slot of a predicate source and whether it is negated."""
        if isinstance(operand, Negated):
            return self.src(operand.register, 1), True
        return self.src(operand, 1), False

    def dst(self, operand, bits: int, wider: bool = False) -> int:
        """The slot of a destination."""
        if operand == SINK:
            return self.slots.new(bits)
        if not isinstance(operand, Register):
            raise self.unknown(f"operand {operand} cannot be a destination")
        slot = self.slots.register(operand)
        have = self.slots.bits[slot]
        if have != bits and not (wider and have > bits):
            raise self.unknown(f"{operand.name} has {have} bits where {bits} are written")
        self.defs.append(slot)
        return slot

    def address(self, operand) -> tuple[int, int, int]:
        """Slot, bits and byte offset of an address operand."""
        if not isinstance(operand, Address):
            raise self.unknown(f"{operand} is not an address")
        base = operand.base
        if isinstance(base, Register):
            slot = self.slots.register(base)
            self.uses.append(slot)
        elif isinstance(base, Immediate):
            slot = self.slots.constant(base.value, 64)
        else:
            slot = self.symbol(base, 64)
        return slot, self.slots.bits[slot], operand.offset

    def vector(self, operand, count: int) -> Sequence:
        """The `count` items of a vector operand."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if len(items) != count:
            raise self.unknown(f"{len(items)} registers where {count} are wanted")
        return items

    # Operations.

    def pure(self, fn: Callable[..., Any], dsts: Sequence[int], srcs: Sequence[int], **kw) -> Op:
        """An operation that reads `srcs` and writes `dsts`, touching nothing else."""
        if len(dsts) == 1:
            run = _single(fn, dsts[0], tuple(srcs))
        else:
            run = _several(fn, tuple(dsts), tuple(srcs))
        run = self.guarded_pure(run, tuple(dsts))
        return self.op(run, results=tuple(dsts), sources=tuple(srcs), **kw)

    def guarded_pure(self, run, dsts):
        if self.ins.guard is None:
            return run
        guard, negate = self.guard_slot(), self.ins.negate
        self.uses.extend(dsts)

        def guarded(R, G):
            old = [R[d] for d in dsts]
            run(R, G)
            keep = R[guard] if guard not in dsts else old[dsts.index(guard)]
            for d, value in zip(dsts, old, strict=True):
                R[d] = np.where(keep, value, R[d]) if negate else np.where(keep, R[d], value)

        return guarded

    def guard_slot(self) -> int:
        slot = self.slots.register(self.ins.guard)
        self.uses.append(slot)
        return slot

    def effect(self, fn, dsts: Sequence[int], srcs: Sequence[int], **kw) -> Op:
        """An operation on more than registers.

        `fn(G, mask, *sources)` returns one array per destination; `mask` is None when every lane
        of the group executes it.
        """
        dsts, srcs = tuple(dsts), tuple(srcs)
        if self.ins.guard is None:

            def run(R, G):
                values = fn(G, G.mask, *[R[s] for s in srcs])
                for d, value in zip(dsts, values or (), strict=True):
                    R[d] = value
        else:
            guard, negate = self.guard_slot(), self.ins.negate
            self.uses.extend(dsts)

            def run(R, G):
                mask = G.and_mask(~R[guard] if negate else R[guard])
                if mask is not None and not mask.any():
                    return
                values = fn(G, mask, *[R[s] for s in srcs])
                for d, value in zip(dsts, values or (), strict=True):
                    R[d] = value if mask is None else np.where(mask, value, R[d])

        kw.setdefault("effect", True)
        return self.op(run, results=dsts, sources=srcs, **kw)

    def op(self, run, **kw) -> Op:
        if kw.get("sync") is not None and not kw.get("waits"):
            run = _synchronising(run)
        bits = 0
        for slot in self.uses:
            bits |= 1 << slot
        return Op(self.ins, run, tuple(self.uses), tuple(self.defs), use_bits=bits, **kw)


def _synchronising(run):
    """A warp-synchronous operation orders what its lanes did before and do after."""

    def synchronised(R, G):
        run(R, G)
        G.grid.races.synchronise_warps(G.numbers)

    return synchronised


def _single(fn, d, srcs):
    """Specialised closures: this is the interpreter's inner loop."""
    if len(srcs) == 1:
        (a,) = srcs

        def run(R, G):
            R[d] = fn(R[a])
    elif len(srcs) == 2:
        a, b = srcs

        def run(R, G):
            R[d] = fn(R[a], R[b])
    elif len(srcs) == 3:
        a, b, c = srcs

        def run(R, G):
            R[d] = fn(R[a], R[b], R[c])
    else:

        def run(R, G):
            R[d] = fn(*[R[s] for s in srcs])

    return run


def _several(fn, dsts, srcs):
    def run(R, G):
        for d, value in zip(dsts, fn(*[R[s] for s in srcs]), strict=True):
            R[d] = value

    return run
