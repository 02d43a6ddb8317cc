"""Warpgroup matrix instructions of sm_90a, asynchronous copies, and the tile that they read.

A tile of operand B holds rows (tokens) of 64 bf16, 128 bytes each; the 16-byte piece p of row r
stands at piece p ^ (r % 8), the 128-byte swizzle, so that neither copies nor the matrix unit meet a
bank twice. Tiles begin at multiples of 1024 bytes.
"""

from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ROW_BYTES = 128
PIECES = ROW_BYTES // 16
"""16-byte pieces of a row."""
_SWIZZLE_128 = 1 << 62
_EIGHT_ROWS = (1024 >> 4) << 32
"""Descriptor field: bytes from one group of 8 rows to the next."""
_K_STEP = 32 >> 4
"""Descriptor step from one instruction's 16 elements of K to the next's."""


def tile_descriptor(address: Uint32) -> Uint64:
    """What the matrix instruction is told about a tile at a shared-memory address."""
    return Uint64(address >> Uint32(4)) | Uint64(_SWIZZLE_128 | _EIGHT_ROWS | 1 << 16)


def swizzled_piece(row, piece):
    """Offset of a 16-byte piece of a row in its tile."""
    # A row is not negative, which the compiler does not know: a remainder would allow for it.
    return row * ROW_BYTES + ((piece ^ (row & (PIECES - 1))) * 16)


@dsl_user_op
def multiply(sums, a, descriptor, tile_bytes, *, loc=None, ip=None):
    """Starts sums += a (64 rows) times the columns of tiles, as one group of instructions.

    Args:
        sums: width / 2 float32 of this thread; not to be touched before the group is waited for.
        a: registers, four for each 16 of K; likewise.
        descriptor: the first tile.
        tile_bytes: from a tile's address to the next one's.

    Returns:
        The sums.
    """
    count = len(sums)
    registers = ", ".join(f"${index}" for index in range(count))
    lines = [
        "{",
        ".reg .pred add;",
        ".reg .b32 one;",
        ".reg .b64 d;",
        "mov.b32 one, 1;",
        "setp.ne.b32 add, one, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(len(a) // 4):
        rows = ", ".join(f"${count + 4 * step + index}" for index in range(4))
        lines += [
            f"add.s64 d, ${count + len(a)}, {step // 4 * (tile_bytes >> 4) + step % 4 * _K_STEP};",
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
            f"{{{registers}}}, {{{rows}}}, d, add, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    operands = [*a, descriptor, *sums]
    constraints = ["=f"] * count + ["r"] * len(a) + ["l"] + [str(index) for index in range(count)]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * count),
        [value.ir_value(loc=loc, ip=ip) for value in operands],
        "\n".join(lines),
        ",".join(constraints),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(llvm.extractvalue(T.f32(), result, [index], loc=loc, ip=ip))
        for index in range(count)
    ]


def _ptx(text, types=(), *arguments):
    return cute.arch.inline_ptx(text, write_only_types=list(types), read_only_args=list(arguments))


def wait_groups(pending: int):
    """Returns once at most `pending` groups of matrix instructions are under way."""
    _ptx(f"wgmma.wait_group.sync.aligned {pending};")


def copy_piece(target: Uint32, source: Int64):
    """Starts a copy of 16 bytes into shared memory."""
    _ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", (), target, source)


def commit_copies():
    """Ends a group of copies."""
    _ptx("cp.async.commit_group;")


def wait_copies(pending: int):
    """Returns once at most `pending` groups of this thread's copies are under way.

    What has landed may be shown to the matrix unit.
    """
    _ptx(f"cp.async.wait_group {pending};")


def show_to_matrix_unit():
    """What this thread wrote to shared memory is there for the matrix unit, after a barrier."""
    _ptx("fence.proxy.async.shared::cta;")


def clear_piece(target: Uint32):
    """Zeros in 16 bytes of shared memory."""
    _ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", (), target, Uint32(0))


def pick_halves(low: Uint32, high: Uint32, upper) -> Uint32:
    """The low halves of two words as one word, or the high ones where `upper` is 1."""
    return _ptx(
        "{ .reg .b32 s; mad.lo.u32 s, {$r2}, 0x2222, 0x5410; prmt.b32 {$w0}, {$r0}, {$r1}, s; }",
        [Uint32],
        low,
        high,
        Uint32(upper),
    )


def lane_here() -> Int32:
    """The lane; what is computed from it needs no register before here."""
    return _ptx("mov.b32 {$w0}, {$r0};", [Int32], cute.arch.lane_idx())


def store_piece(address: Int64, words):
    """Four words to 16 bytes of memory."""
    _ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)
