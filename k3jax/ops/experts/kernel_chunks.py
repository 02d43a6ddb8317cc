"""A chunk of packed weights, 16 rows x 64 k, in front of `mma.sync`."""

import cutlass
from cutlass import Int32, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.packing import CHUNK, ELEMENT_BYTES


def zeros(size, kind):
    """An array of registers."""
    words = cute.make_rmem_tensor((size,), kind)
    for index in range(size):
        words[index] = kind(0)
    return words


def multiply_chunk(words, factors, scales, columns, first, sums, chunk):
    """Four matrix instructions: 16 rows x 64 k of weights times 64 k of 8 columns."""
    rows = []
    for pair in range(2):
        values = []
        for word in range(2):
            values += ptx.dequantize(words[pair * 2 + word], factors[pair])
        if scales is not None:
            values = [ptx.scale_pair(value, scales[pair]) for value in values]
        rows.append(values)
    for step in range(4):
        chain = step % 2 * 4
        a = (rows[0][2 * step], rows[1][2 * step], rows[0][2 * step + 1], rows[1][2 * step + 1])
        b = [columns[first + chunk * 8 + 2 * step + half] for half in range(2)]
        done = ptx.multiply_add(a, b, [sums[chain + value] for value in range(4)])
        for value in range(4):
            sums[chain + value] = done[value]


def multiply_group(group, columns, first, sums, chunks):
    """sums += group of weights times columns[first:], two chains of instructions."""
    lane = cute.arch.lane_idx()
    elements = group + Uint32(lane * 16)
    scales = ptx.load_scales(
        group + Uint32(chunks * ELEMENT_BYTES) + Uint32(lane // 2 * (2 * chunks)), chunks
    )
    words = []
    for chunk in range(chunks):
        words += ptx.load_shared_4(elements + Uint32(chunk * ELEMENT_BYTES))
    every = scales[0]
    for word in scales[1:]:
        every = every | word
    large = ptx.any_lane(every & Uint32(0x80808080))
    _multiply(words, elements, scales, columns, first, sums, chunks, large)


@cute.jit
def _multiply(
    words,
    elements: Uint32,
    scales,
    columns: cute.Tensor,
    first: cutlass.Constexpr,
    sums: cute.Tensor,
    chunks: cutlass.Constexpr,
    large: Int32,
):
    """The group's matrix instructions; `large` is 1 if some scale byte is 128 or more, else 0.

    2^126 times such a scale is past bfloat16, so it takes a second multiply. That path is a loop of
    `large` rounds over volatile loads: as a branch, the compiler would predicate it or hoist what
    both paths share, and every group would pay for it.
    """
    for _ in cutlass.range(large, unroll=1):
        for chunk in cutlass.range_constexpr(chunks):
            factors = [
                ptx.scale_value(ptx.scale_byte(scales, 2 * chunk + pair)) for pair in range(2)
            ]
            again = ptx.load_shared_volatile_4(elements + Uint32(chunk * ELEMENT_BYTES))
            multiply_chunk(again, [Uint32(ptx.ONES)] * 2, factors, columns, first, sums, chunk)
    if large == 0:
        for chunk in cutlass.range_constexpr(chunks):
            factors = [ptx.power_of_byte(scales, 2 * chunk + pair) for pair in range(2)]
            multiply_chunk(
                words[4 * chunk : 4 * chunk + 4], factors, None, columns, first, sums, chunk
            )


def multiply_groups(groups, columns, sums, chunks):
    """`multiply_group` for several groups, with columns in shared memory: takes few registers.

    Args:
        groups: shared addresses of groups of packed weights.
        columns: shared address of this lane's part of its column, where the groups begin.
        sums: 8 registers for each group.
        chunks: of a group.
    """
    lane = cute.arch.lane_idx()
    elements = [group + Uint32(lane * 16) for group in groups]
    offset = chunks * ELEMENT_BYTES + lane // 2 * (2 * chunks)
    places = [group + Uint32(offset) for group in groups]
    every = Uint32(0)
    for place in places:
        for word in ptx.load_scales(place, chunks):
            every = every | word
    large = ptx.any_lane(every & Uint32(0x80808080))
    _multiply_groups(elements, places, columns, sums, chunks, large)


@cute.jit
def _multiply_groups(
    elements, places, columns: Uint32, sums, chunks: cutlass.Constexpr, large: Int32
):
    """The groups' matrix instructions, for large scales as in `_multiply`.

    Scales are loaded once more where they are used, and columns for each chunk.
    """
    for _ in cutlass.range(large, unroll=1):
        for element, scale, chains in zip(elements, places, sums, strict=True):
            for chunk in cutlass.range_constexpr(chunks):
                place = columns + Uint32(chunk * (2 * CHUNK))
                halves = [ptx.load_shared_volatile_4(place + Uint32(16 * i)) for i in range(2)]
                both = ptx.load_shared_volatile_half(scale + Uint32(2 * chunk))
                factors = [ptx.scale_value(ptx.spread_byte(both, row)) for row in range(2)]
                words = ptx.load_shared_volatile_4(element + Uint32(chunk * ELEMENT_BYTES))
                ones, held = [Uint32(ptx.ONES)] * 2, [*halves[0], *halves[1]]
                multiply_chunk(words, ones, factors, held, 0, chains, 0)
    if large == 0:
        every = [ptx.load_scales(scale, chunks) for scale in places]
        for chunk in cutlass.range_constexpr(chunks):
            place = columns + Uint32(chunk * (2 * CHUNK))
            held = [*ptx.load_shared_4(place), *ptx.load_shared_4(place + Uint32(16))]
            for element, scales, chains in zip(elements, every, sums, strict=True):
                factors = [ptx.power_of_byte(scales, 2 * chunk + row) for row in range(2)]
                words = ptx.load_shared_4(element + Uint32(chunk * ELEMENT_BYTES))
                multiply_chunk(words, factors, None, held, 0, chains, 0)
