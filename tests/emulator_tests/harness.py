"""Runs a few PTX instructions on arrays, one thread an element."""

import numpy as np

from tests.emulator import GlobalMemory, run_kernel

HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"
BLOCK = 128


def kernel(body: str, parameters: list[str], declarations: str = "", directives: str = "",
           target: str = "sm_90a") -> str:  # fmt: skip
    """A module with one kernel `k`."""
    listed = ",\n".join(f"\t.param .{kind} p{i}" for i, kind in enumerate(parameters))
    loads = "\n".join(
        f"\tld.param.{kind} {'%pa' if kind == 'u64' else '%pi'}{i}, [p{i}];"
        for i, kind in enumerate(parameters)
    )
    return f"""{HEADER.format(target=target)}
.extern .shared .align 128 .b8 smem[];
.visible .entry k(
{listed}
)
{directives}
{{
\t.reg .pred %p<20>;
\t.reg .b16 %h<20>;
\t.reg .b32 %r<80>;
\t.reg .b64 %d<20>;
\t.reg .b64 %pa<20>;
\t.reg .b32 %pi<20>;
\t.reg .b32 %thread, %lane, %warp, %block;
\t.reg .b32 %sm;
{declarations}
{loads}
\tmov.u32 %thread, %tid.x;
\tand.b32 %lane, %thread, 31;
\tshr.u32 %warp, %thread, 5;
\tmov.u32 %block, %ctaid.x;
\tmov.b32 %sm, smem;
{body}
\tret;
}}
"""


def apply(code: str, inputs, outputs, target: str = "sm_90a", **options) -> list[np.ndarray]:
    """Runs `code` on elements of 1-D unsigned arrays of one length.

    Inputs are in registers %a0, %a1, ..., results are taken from %z0, %z1, ...; predicates cannot
    cross memory, so `code` turns them into numbers.
    """
    n = inputs[0].size
    padded = -(-n // BLOCK) * BLOCK
    memory = GlobalMemory()
    addresses, declarations, before, after = [], [], [], []
    for i, array in enumerate(inputs):
        data = np.zeros(padded, array.dtype)
        data[:n] = array
        addresses.append(memory.allocate(f"input {i}", data))
        bits = array.dtype.itemsize * 8
        declarations.append(f"\t.reg .b{max(bits, 16)} %a{i};")
        before.append(_access("ld", i, i, bits, f"%a{i}"))
    for i, dtype in enumerate(outputs):
        bits = np.dtype(dtype).itemsize * 8
        addresses.append(memory.allocate(f"output {i}", padded * bits // 8))
        declarations.append(f"\t.reg .b{max(bits, 16)} %z{i};")
        after.append(_access("st", len(inputs) + i, len(inputs) + i, bits, f"%z{i}"))
    index = "\tmov.u32 %r79, %ntid.x;\n\tmad.lo.u32 %r79, %block, %r79, %thread;"
    body = "\n".join([index, *before, code, *after])
    text = kernel(body, ["u64"] * len(addresses), "\n".join(declarations), target=target)
    run_kernel(text, "k", (padded // BLOCK, 1, 1), (BLOCK, 1, 1), (1, 1, 1), 0, addresses, memory,
               **options)  # fmt: skip
    results = []
    for address, dtype in zip(addresses[len(inputs) :], outputs, strict=True):
        data, written = memory.contents(address, padded * np.dtype(dtype).itemsize)
        assert written.all()
        results.append(data.view(dtype)[:n])
    return results


def _access(op: str, parameter: int, scratch: int, bits: int, register: str) -> str:
    address = (
        f"\tmul.wide.u32 %d{scratch}, %r79, {bits // 8};\n"
        f"\tadd.u64 %d{scratch}, %pa{parameter}, %d{scratch};\n"
    )
    if op == "ld":
        return address + f"\tld.global.b{bits} {register}, [%d{scratch}];"
    return address + f"\tst.global.b{bits} [%d{scratch}], {register};"


def run(text: str, threads: int, args, memory, grid: int = 1, shared: int = 0, cluster: int = 1,
        **options):  # fmt: skip
    """Runs the kernel of `kernel(...)` with one-dimensional extents."""
    return run_kernel(
        text, "k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, args, memory, **options
    )


def integers(bits: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random integers of every magnitude, with the edges among them."""
    dtype = np.dtype(f"u{bits // 8}")
    edges = [0, 1, 2, 3, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    shift = rng.integers(0, bits, count)
    values = (
        rng.integers(0, 1 << bits, count, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (rng.integers(0, 1 << 64, count, dtype=np.uint64, endpoint=False))
    )
    values = (values >> shift.astype(np.uint64)).astype(dtype)
    values[: len(edges)] = edges
    return rng.permutation(values)


def floats(bits: int, mantissa_bits: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random float codes: everything, near one, subnormal, and the special values."""
    dtype = np.dtype(f"u{bits // 8}")
    top = ((1 << (bits - 1 - mantissa_bits)) - 1) << mantissa_bits
    one = (top >> (mantissa_bits + 1)) << mantissa_bits
    codes = rng.integers(0, 1 << bits, count, dtype=np.uint64)
    near = one + rng.integers(-(4 << mantissa_bits), 4 << mantissa_bits, count)
    tiny = rng.integers(0, 2 << mantissa_bits, count)
    kind = rng.integers(0, 4, count)
    sign = rng.integers(0, 2, count).astype(np.uint64) << np.uint64(bits - 1)
    chosen = np.where(kind == 0, codes, np.where(kind == 1, tiny, near).astype(np.uint64) | sign)
    special = [0, 1 << (bits - 1), top, top | 1 << (bits - 1), top | 1, one, top - 1]
    chosen[: len(special)] = special
    return rng.permutation(chosen.astype(dtype))
