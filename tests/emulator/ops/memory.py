"""`ld` and `st` in every state space, through one road that atomics and matrix loads share."""

import numpy as np

from ..access import Access
from ..binding import Binder, Op, instruction
from ..instruction import Address, Symbol, Vector
from ..types import RAW

_SEMANTICS = ("weak", "volatile", "relaxed", "acquire", "release", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
_INTEGERS = (f"{k}{n}" for k in "bus" for n in (8, 16, 32, 64))
_TYPES = (*_INTEGERS, "f16", "bf16", "f32", "f64")


def take_space(b: Binder) -> str:
    """Takes the state space: "global", "shared", "local", "param", "const" or "generic"."""
    shared = b.prefixed("shared")
    if shared is not None:
        if shared not in ("shared", "shared::cta", "shared::cluster"):
            raise b.unknown(f"state space .{shared} is not implemented")
        return "shared"
    return b.one_of("global", "local", "param", "const", default="generic")


def take_hints(b: Binder) -> bool:
    """Takes cache hints, which change nothing here; whether there is a policy operand."""
    for prefix in ("L1::", "L2::"):
        while (hint := b.prefixed(prefix)) is not None:
            if hint == "L2::cache_hint":
                return True
    return False


def take_order(b: Binder) -> bool:
    """Takes semantics and scope; whether the access is a strong (synchronising) one."""
    semantics = b.one_of(*_SEMANTICS, default="weak")
    b.one_of(*_SCOPES, default="")
    return semantics != "weak"


def take_count(b: Binder) -> int:
    """Takes `.v2`, `.v4` or `.v8`."""
    return int(b.one_of("v2", "v4", "v8", default="v1")[1:])


@instruction("ld", "ldu")
def ld(b: Binder) -> Op:
    """Load, scalar or vector."""
    strong = take_order(b)
    space = take_space(b)
    if space == "param":
        return _ld_param(b)
    b.flag("nc")
    b.one_of(*_CACHE, default="")
    b.flag("unified")
    policy = take_hints(b)
    count = take_count(b)
    kind = b.type(*_TYPES)
    if policy:
        b.src(b.operands.pop(), 64)
    d, where = b.operands
    address = b.address(where)
    unit = kind.bits // 8
    dsts = [b.dst(item, max(kind.bits, 16), wider=True) for item in b.vector(d, count)]
    raws = [RAW[b.slots.bits[slot]] for slot in dsts]
    finish = [_extender(kind, raw) for raw in raws]
    road = Road(b, space, address, unit, count, strong)

    def fn(G, mask, base):
        values = road.load(G, mask, base)
        if count == 1:
            return (finish[0](values),)
        return [f(values[..., i]) for i, f in enumerate(finish)]

    return b.effect(fn, dsts, [address[0]], effect=strong, poll=strong, addresses=True)


def _extender(kind, raw):
    """Loaded units to the register's width: sign or zero extension."""
    if kind.raw == raw:
        return lambda v: v
    if kind.kind == "s":
        return lambda v: v.view(kind.view).astype(np.dtype(f"i{raw.itemsize}")).view(raw)
    return lambda v: v.astype(raw)


def _ld_param(b: Binder) -> Op:
    """Kernel parameters are constants of the launch."""
    count = take_count(b)
    kind = b.type(*_TYPES)
    d, where = b.operands
    if not isinstance(where, Address) or not isinstance(where.base, Symbol):
        raise b.unknown("only named parameters can be loaded")
    name, unit = where.base.name, kind.bits // 8
    size = b.slots.parameter_bytes.get(name)
    if size is None or where.offset + unit * count > size:
        raise b.unknown(f"{unit * count} bytes at {where.offset} of parameter {name!r} ({size})")
    srcs = [b.slots.parameter(name, where.offset + i * unit, kind.bits) for i in range(count)]
    items = b.vector(d, count)
    dsts = [b.dst(item, max(kind.bits, 16), wider=True) for item in items]
    finish = [_extender(kind, RAW[b.slots.bits[slot]]) for slot in dsts]
    if count == 1:
        return b.pure(lambda v: np.array(finish[0](v)), dsts, srcs)
    return b.pure(lambda *v: [np.array(f(x)) for f, x in zip(finish, v, strict=True)], dsts, srcs)


@instruction("st")
def st(b: Binder) -> Op:
    """Store, scalar or vector."""
    strong = take_order(b)
    if b.flag("async"):
        from .async_copy import store_async  # which imports this module

        return store_async(b)
    space = take_space(b)
    if space in ("param", "const"):
        raise b.unknown(f"st.{space} is not implemented")
    b.one_of(*_CACHE, default="")
    policy = take_hints(b)
    count = take_count(b)
    kind = b.type(*_TYPES)
    if policy:
        b.src(b.operands.pop(), 64)
    where, x = b.operands
    address = b.address(where)
    unit = kind.bits // 8
    road = Road(b, space, address, unit, count, strong)
    items = x.items if isinstance(x, Vector) else (x,)
    b.vector(x, count)
    srcs = [b.src(item, _source_bits(b, item, kind.bits), kind.kind) for item in items]

    def fn(G, mask, base, *values):
        values = [G.wide(v) for v in values]
        if unit < values[0].dtype.itemsize:
            values = [v.astype(kind.raw) for v in values]
        data = values[0] if count == 1 else np.stack(values, axis=-1)
        road.store(G, mask, base, data)

    return b.effect(fn, [], [address[0], *srcs], stored=tuple(srcs))


def _source_bits(b: Binder, operand, bits: int) -> int:
    """A narrow store may take a wider register."""
    slots = b.slots
    name = getattr(operand, "name", None)
    if name in slots.registers:
        return max(bits, slots.bits[slots.registers[name]])
    return max(bits, 16)


class Road:
    """One instruction's way to memory: address arithmetic, state space, checks.

    Args:
        b: the instruction.
        space: as given by `take_space`.
        address: as given by `Binder.address`.
        unit, count: bytes of an element, elements per lane.
        strong: the access synchronises (volatile, relaxed, acquire, release, atomic).
    """

    def __init__(self, b: Binder, space: str, address, unit: int, count: int, strong: bool):
        _, bits, offset = address
        self.ins, self.space = b.ins, space
        self.unit, self.count, self.strong = unit, count, strong
        if space == "const":
            raise b.unknown("constant memory is not implemented")
        if space in ("global", "generic") and bits != 64:
            raise b.unknown(f"a {bits}-bit address of {space} memory")
        self.add = RAW[bits].type(offset % (1 << bits)) if offset else None

    def resolve(self, G, mask, base):
        """Memory, its offsets and the access object; generic addresses must agree in space."""
        address = base if self.add is None else base + self.add
        address = G.wide(address)
        space = self.space
        if space == "generic":
            space, address = self.generic(G, mask, address)
        access = Access(self.ins, G, mask, self.strong)
        if space == "global":
            memory = G.grid.device.memory
            return memory, address - np.uint64(memory.BASE), access
        if space == "local":
            memory = G.grid.local
            return memory, memory.offsets(address, G.numbers), access
        memory = G.grid.shared
        return memory, memory.offsets(address, G.rows(G.grid.first_block)), access

    def generic(self, G, mask, address):
        """The common state space of the active lanes' generic addresses."""
        window = address >> np.uint64(48)
        seen = np.unique(window if mask is None else window[mask])
        if seen.size != 1 or int(seen[0]) > 2:
            raise Access(self.ins, G, mask, False).error(
                "lanes of one generic access address different state spaces"
            )
        name = ("global", "shared", "local")[int(seen[0])]
        if name == "global":
            return name, address
        return name, address & np.uint64(0xFFFFFFFF)

    def load(self, G, mask, base):
        memory, offset, access = self.resolve(G, mask, base)
        access.note(memory, offset, self.unit * self.count)
        values = memory.load(offset, self.unit, self.count, mask, access)
        access.ordered_read(memory, offset, self.unit * self.count)
        return values

    def store(self, G, mask, base, values) -> None:
        memory, offset, access = self.resolve(G, mask, base)
        access.note(memory, offset, self.unit * self.count)
        access.ordered_write(memory, offset, self.unit * self.count)
        memory.store(offset, values, self.unit, self.count, mask, access)
        if G.storing is not None:
            memory.forget(offset, self.unit, G.storing & G.active(mask)[..., None])
        G.grid.device.progress += 1
