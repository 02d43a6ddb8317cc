"""`mma.sync`, `ldmatrix`, `stmatrix`, `movmatrix`.

Fragments follow PTX: with g = lane / 4 and t = lane % 4, register r of A holds row g + 8 (r % 2)
and the columns from (t + 4 (r / 2)) e on, e being the elements of a register; B likewise with its
column g; C holds row g + 8 (r / 2) and columns 2 t + r % 2.
"""

import numpy as np

from ..binding import Binder, Op, instruction
from ..dotadd import fused_dot_add
from ..types import LANES
from .memory import Road, take_space
from .minifloat import FORMATS
from .packed import widen

SMALLEST = {"bf16": -126, "f16": -14, "e4m3": -6, "e5m2": -14}
_SHAPES = {("m16n8k16", 2), ("m16n8k8", 2), ("m16n8k32", 1)}


def elements(registers: np.ndarray, name: str) -> np.ndarray:
    """32-bit registers [...] as float32 elements [..., 2 or 4], low bits first."""
    parts = np.ascontiguousarray(registers)[..., None]
    if name in ("bf16", "f16"):
        return widen(parts.view(np.uint16), name)
    return FORMATS[name].decode(parts.view(np.uint8))


def a_rows(registers: list[np.ndarray], name: str) -> np.ndarray:
    """Registers of A to its values, [warps, 16, K]."""
    return _rows(registers, name, 2)


def _rows(registers: list[np.ndarray], name: str, halves: int) -> np.ndarray:
    """Fragment registers to a matrix [warps, 8 halves, K]; `halves` is 2 for A and 1 for B."""
    values = elements(np.stack(registers, axis=-1), name)  # [w, lane, register, e]
    w, _, count, e = values.shape
    # [w, g, t, column group, half, e] -> [w, half, g, column group, t, e]
    values = values.reshape(w, 8, 4, count // halves, halves, e)
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(w, 8 * halves, -1)


def _accumulator(registers: list[np.ndarray]) -> np.ndarray:
    """C registers (float32 bits) to [warps, 16, 8]."""
    values = np.stack(registers, axis=-1)  # [w, lane, 4]
    values = values.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4)
    return values.reshape(-1, 16, 8)


def _fragments(matrix: np.ndarray) -> list[np.ndarray]:
    """[warps, 16, 8] to the four C registers."""
    values = matrix.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, LANES, 4)
    return [np.ascontiguousarray(values[..., i]) for i in range(4)]


@instruction("mma")
def mma(b: Binder) -> Op:
    """`mma.sync.aligned.m16n8k*.row.col` of bf16, f16, e4m3, e5m2 with float32 accumulators."""
    for name in ("sync", "aligned", "row", "col"):
        b.one_of(name)
    shape = b.one_of("m16n8k16", "m16n8k8", "m16n8k32")
    into, left, right, out_of = b.modifiers[-4:]
    del b.modifiers[-4:]
    size = 2 if left in ("bf16", "f16") else 1
    if (shape, size) not in _SHAPES or {left, right} - set(SMALLEST):
        raise b.unknown(f"mma.{shape} of {left} and {right} is not implemented")
    if into != "f32" or out_of != "f32" or (size == 2 and left != right):
        raise b.unknown(f"mma with accumulator {into}, {out_of} is not implemented")
    count = int(shape.split("k")[1]) * size // 8
    d, x, y, z = b.operands
    srcs = [b.src(r, 32) for r in b.vector(x, count)]
    srcs += [b.src(r, 32) for r in b.vector(y, count // 2)]
    srcs += [b.src(r, 32, "f") for r in b.vector(z, 4)]
    dsts = [b.dst(r, 32) for r in b.vector(d, 4)]
    smallest = min(SMALLEST[left], SMALLEST[right])

    def fn(G, mask, *registers):
        registers = [G.wide(r) for r in registers]
        rows = a_rows(registers[:count], left)
        columns = _rows(registers[count : count + count // 2], right, 1)
        c = _accumulator(registers[count + count // 2 :]).view(np.float32)
        return _fragments(fused_dot_add(rows, columns, c, smallest))

    def mark(R, G, flags):
        """A row of A spoils a row of D, a column of B a column."""
        rows = np.stack(flags[:count], axis=-1).reshape(-1, 8, 4, count // 2, 2).any(axis=(2, 3))
        columns = np.stack(flags[count : count + count // 2]).any(axis=0).reshape(-1, 8, 4)
        spoilt = _accumulator(flags[count + count // 2 :])
        spoilt = spoilt | rows.transpose(0, 2, 1).reshape(-1, 16, 1)
        return _fragments(spoilt | columns.any(axis=2)[:, None, :])

    return b.effect(fn, dsts, srcs, effect=False, sync="all", mark=mark)


@instruction("ldmatrix")
def ldmatrix(b: Binder) -> Op:
    """Loads 8x8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the rows of matrix i."""
    for name in ("sync", "aligned", "m8n8"):
        b.one_of(name)
    count = int(b.one_of("x1", "x2", "x4")[1:])
    transposed = b.flag("trans")
    take_space(b)
    b.type("b16")
    d, where = b.operands
    address = b.address(where)
    dsts = [b.dst(r, 32) for r in b.vector(d, count)]
    road = Road(b, "shared", address, 4, 4, False)

    def fn(G, mask, base):
        giving = np.broadcast_to(np.arange(LANES) < 8 * count, (G.count, LANES))
        if mask is not None:
            giving = giving & mask
        words = road.load(G, None if giving.all() else giving, base)
        if G.undefined is not None:
            flags = _distribute(np.where(G.undefined, np.uint32(0xFFFFFFFF), np.uint32(0)))
            G.undefined = np.stack(flags, axis=-1) != 0
        return _distribute(words)

    def _distribute(words):
        halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4, 8, 8)[:, :count]
        if transposed:
            halves = halves.transpose(0, 1, 3, 2)
        # Lane 4 r + c takes columns 2 c and 2 c + 1 of row r.
        lanes = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, count, LANES)
        return [np.ascontiguousarray(lanes[:, i]) for i in range(count)]

    return b.effect(fn, dsts, [address[0]], effect=False, sync="all", addresses=True)


@instruction("stmatrix")
def stmatrix(b: Binder) -> Op:
    """Stores 8x8 matrices of 16-bit elements: the inverse of `ldmatrix`."""
    for name in ("sync", "aligned", "m8n8"):
        b.one_of(name)
    count = int(b.one_of("x1", "x2", "x4")[1:])
    transposed = b.flag("trans")
    take_space(b)
    b.type("b16")
    where, x = b.operands
    address = b.address(where)
    srcs = [b.src(r, 32) for r in b.vector(x, count)]
    road = Road(b, "shared", address, 4, 4, False)

    def fn(G, mask, base, *registers):
        lanes = np.stack([G.wide(r) for r in registers], axis=1)
        halves = lanes.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            halves = np.ascontiguousarray(halves.transpose(0, 1, 3, 2))
        words = np.zeros((G.count, LANES, 4), np.uint32)
        words[:, : 8 * count] = halves.view(np.uint32).reshape(-1, 8 * count, 4)
        giving = np.broadcast_to(np.arange(LANES) < 8 * count, (G.count, LANES))
        if mask is not None:
            giving = giving & mask
        road.store(G, None if giving.all() else giving, base, words)

    return b.effect(fn, [], [address[0], *srcs], sync="all")


@instruction("movmatrix")
def movmatrix(b: Binder) -> Op:
    """Transposes an 8x8 matrix of 16-bit elements across the warp."""
    for name in ("sync", "aligned", "m8n8", "trans"):
        b.one_of(name)
    b.type("b16")
    d, x = b.operands

    def fn(G, mask, value):
        halves = np.ascontiguousarray(G.wide(value)).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(halves.transpose(0, 2, 1))
        return (turned.view(np.uint32).reshape(-1, LANES),)

    return b.effect(fn, [b.dst(d, 32)], [b.src(x, 32)], effect=False, sync="all")
