"""A chunk of packed weights, 16 rows x 64 k, in front of `mma.sync`."""

from cutlass import cute

from k3jax.ops import kernel_ptx as ptx


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
