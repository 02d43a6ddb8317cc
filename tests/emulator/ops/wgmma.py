"""`wgmma`: a warpgroup of four warps multiplies 64 rows by a tile in shared memory.

Warp w of the group holds rows 16 w .. 16 w + 15, in the fragments of `mma.m16n8k16`. Operands in
shared memory are K-major, in any of the swizzle modes of the matrix descriptor.
"""

import numpy as np

from ..access import Access
from ..binding import Binder, Op, instruction
from ..dotadd import FP8_WGMMA_FRACTION_BITS, FRACTION_BITS, fused_dot_add
from ..instruction import Immediate, Vector
from ..types import LANES
from ..warpgroups import Warpgroups
from .matrix import SMALLEST, a_rows, elements

_SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""Mode -> bytes of a row of the swizzle atom, mask of the row bits that move pieces."""


@instruction("wgmma")
def wgmma(b: Binder) -> Op:
    """The wgmma family."""
    b.require("sm_90")
    action = b.one_of("fence", "commit_group", "wait_group", "mma_async")
    b.one_of("sync")
    b.one_of("aligned")
    if action == "fence":
        return b.op(lambda R, G: None, effect=True, sync="all")
    if action == "commit_group":
        return b.effect(
            lambda G, mask: G.grid.part(Warpgroups).commit(G.numbers), [], [], sync="all"
        )
    if action == "wait_group":
        keep = b.operands[0].value
        return b.effect(
            lambda G, mask: G.grid.part(Warpgroups).wait(G.numbers, keep), [], [], sync="all"
        )
    return _multiply(b)


def _multiply(b: Binder) -> Op:
    shape = b.prefixed("m64n") or ""
    into, left, right = b.modifiers[-3:]
    del b.modifiers[-3:]
    size = 2 if left in ("bf16", "f16") else 1
    n, _, k = shape.removeprefix("m64n").partition("k")
    if into != "f32" or {left, right} - set(SMALLEST) or k != str(32 // size):
        raise b.unknown(f"wgmma {shape} of {left} and {right} into {into} is not implemented")
    n = int(n)
    d, a, descriptor, add, *scales = b.operands
    factors = [_constant(b, s) for s in scales[:2]]
    if any(_constant(b, s) for s in scales[2:]):
        raise b.unknown("operands that are not K-major are not implemented")
    accumulators = [b.src(r, 32, "f") for r in b.vector(d, n // 2)]
    dsts = [b.dst(r, 32) for r in d.items]
    rows = [b.src(r, 32) for r in b.vector(a, 4)] if isinstance(a, Vector) else [b.src(a, 64)]
    srcs = [*accumulators, *rows, b.src(descriptor, 64)]
    srcs.append(b.predicate(add)[0] if not isinstance(add, Immediate) else b.src(add, 1))
    from_registers = len(rows) == 4
    bits = sum(1 << slot for slot in set(dsts))
    smallest = min(SMALLEST[left], SMALLEST[right])
    fraction = FRACTION_BITS if size == 2 else FP8_WGMMA_FRACTION_BITS

    def fn(G, mask, *values):
        c = _join([G.wide(v) for v in values[: n // 2]]).view(np.float32)
        c = np.where(_first(G, values[-1]).astype(bool)[:, None, None], c, np.float32(0))
        access = Access(b.ins, G, mask)
        columns, words, lost = _tile(access, _first(G, values[-2]), 0, n, right)
        if from_registers:
            matrix = a_rows([G.wide(v) for v in values[n // 2 : -2]], left)
        else:
            first_row = (G.grid.warp_in_block[G.numbers] % 4) * 16
            matrix, more, _ = _tile(access, _first(G, values[n // 2]), first_row, 16, left)
            words = np.concatenate([words, more], axis=1)
        for row, number in enumerate(G.numbers.tolist()):
            G.grid.part(Warpgroups).issue(number, bits, np.unique(words[row]))
        if lost.any():
            spoilt = np.broadcast_to(lost[:, None, :], c.shape)
            G.undefined = np.stack(_split(spoilt), axis=-1)
        scaled = matrix * np.float32(factors[0]) * np.float32(factors[1])
        return _split(fused_dot_add(scaled, columns, c, smallest, fraction))

    def mark(R, G, flags):
        spoilt = _join([np.ascontiguousarray(f) for f in flags[: n // 2]])
        if from_registers:
            held = np.stack(flags[n // 2 : -2], axis=-1).reshape(-1, 8, 4, 2, 2).any(axis=(2, 3))
            spoilt = spoilt | held.transpose(0, 2, 1).reshape(-1, 16, 1)
        return _split(spoilt)

    held = {*accumulators, *(rows if from_registers else ())}
    registers = sum(1 << slot for slot in held)
    return b.effect(fn, dsts, srcs, effect=False, sync="all", mark=mark, register_bits=registers)


def _constant(b: Binder, operand) -> int:
    if not isinstance(operand, Immediate):
        raise b.unknown("scales and transpositions must be literals")
    return operand.value


def _first(G, values) -> np.ndarray:
    """The value of every warp's first lane."""
    return G.wide(values)[:, 0]


def _join(registers: list[np.ndarray]) -> np.ndarray:
    """Accumulator registers to [warps, 16, n]."""
    values = np.stack(registers, axis=-1)  # [w, lane, n / 2]
    values = values.reshape(len(values), 8, 4, -1, 2, 2)  # w, g, t, column group, half, e
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(len(values), 16, -1)


def _split(matrix: np.ndarray) -> list[np.ndarray]:
    """[warps, 16, n] to accumulator registers."""
    w, _, n = matrix.shape
    values = matrix.reshape(w, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    values = values.reshape(w, LANES, n // 2)
    return [np.ascontiguousarray(values[..., i]) for i in range(n // 2)]


def _tile(access: Access, descriptors, first_row, num_rows: int, name: str):
    """Rows of a K-major operand: 32 bytes each.

    Returns:
        Values [warps, rows, K], the words read [warps, ...], rows that hold undefined bytes.
    """
    G = access.group
    shared = G.grid.shared
    rows = (np.asarray(first_row).reshape(-1, 1) + np.arange(num_rows))[..., None]
    address = piece_addresses(descriptors, rows)
    offset = shared.offsets(address.reshape(len(address), -1), G.rows(G.grid.first_block))
    rank = (G.grid.block_of[G.numbers] % G.grid.cluster_size).astype(np.uint64)[:, None]
    offset = offset + rank * np.uint64(shared.stride)
    words = (offset.astype(np.int64)[..., None] // 4 + np.arange(4)).reshape(len(address), -1)
    numbers = np.repeat(G.numbers, words.shape[1])
    G.grid.races.async_read(access, numbers, np.zeros_like(numbers), words.ravel())
    data = shared.load(offset, 8, 2, None, access)
    lost = np.zeros(address.shape[:2], bool)
    if G.undefined is not None:
        lost = G.undefined.reshape(*address.shape[:2], -1).any(axis=-1)
        G.undefined = None
    registers = np.ascontiguousarray(data).view(np.uint32).reshape(len(address), num_rows, 8)
    return elements(registers, name).reshape(len(address), num_rows, -1), words, lost


def piece_addresses(descriptors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Shared addresses of the two 16-byte pieces of rows, [warps, rows, 2].

    The swizzle exchanges address bits 4..6 with bits 7..9 by exclusive or, as far as the mode says.
    """
    field = lambda low: ((descriptors >> np.uint64(low)) & np.uint64(0x3FFF)).astype(np.int64) * 16  # noqa: E731
    start, leading, stride = (field(low)[:, None, None] for low in (0, 16, 32))
    mode = (descriptors >> np.uint64(62)).astype(np.int64)[:, None, None]
    width = np.vectorize(lambda m: _SWIZZLES[m][0])(mode)
    mask = np.vectorize(lambda m: _SWIZZLES[m][1])(mode)
    step = np.where(mode == 0, leading, 16)
    piece = np.arange(2)
    address = start + rows // 8 * stride + rows % 8 * width + piece * step
    return (address ^ ((address >> 7) & mask) << 4).astype(np.uint64)
