"""The programs that `compare_bits` runs on the card and in the emulator, with fresh inputs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from cutlass import Int64, Uint32, cute

from k3jax.config import MoEConfig
from k3jax.ops.experts import decode
from k3jax.ops.router import cute as router
from k3jax.runtime.program import ArraySpec, Kernel, Launch, Operand, Program, Result
from k3jax.runtime.target import Target
from tests.emulator.ops.floating import APPROX_ULP
from tests.emulator_tests import cute_kernels as small

BF16 = np.dtype(ml_dtypes.bfloat16)
COUNT = 4096


@dataclass(frozen=True)
class WordKernel(Kernel):
    """z = f(a, b, c) of 32-bit words, f being one entry of `CODE`."""

    name: str
    threads: int = 128
    parameters = (("a", "address"), ("b", "address"), ("c", "address"), ("z", "address"))

    @cute.kernel
    def device(self, a: Int64, b: Int64, c: Int64, z: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        place = Int64(block * self.threads + thread) * 4
        words = [
            cute.arch.inline_ptx(
                "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[at]
            )
            for at in (a + place, b + place, c + place)
        ]
        result = cute.arch.inline_ptx(
            CODE[self.name], write_only_types=[Uint32], read_only_args=words
        )
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[z + place, result])


W, A, B, C = "{$w0}", "{$r0}", "{$r1}", "{$r2}"
EXACT = {
    "fma": f"fma.rn.f32 {W}, {A}, {B}, {C};",
    "add_rz": f"add.rz.f32 {W}, {A}, {B};",
    "mul_ftz": f"mul.ftz.f32 {W}, {A}, {B};",
    "div": f"div.rn.f32 {W}, {A}, {B};",
    "sqrt": f"sqrt.rn.f32 {W}, {A};",
    "min": f"min.f32 {W}, {A}, {B};",
    "max_nan": f"max.NaN.f32 {W}, {A}, {B};",
    "bf16x2_mul": f"mul.rn.bf16x2 {W}, {A}, {B};",
    "bf16x2_fma": f"fma.rn.bf16x2 {W}, {A}, {B}, {C};",
    "bf16x2_add": f"add.rn.bf16x2 {W}, {A}, {B};",
    "f16x2_fma": f"fma.rn.f16x2 {W}, {A}, {B}, {C};",
    "to_bf16x2": f"cvt.rn.bf16x2.f32 {W}, {A}, {B};",
    "to_f16x2": f"cvt.rn.f16x2.f32 {W}, {A}, {B};",
    "to_e4m3x2": "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, "
                 + f"{A}, {B}; cvt.u32.u16 {W}, h; }}",
    "from_e4m3x2": "{ .reg .b16 h; cvt.u16.u32 h, " + f"{A}; cvt.rn.f16x2.e4m3x2 {W}, h; }}",
    "to_s32": f"cvt.rni.s32.f32 {W}, {A};",
    "to_u32": f"cvt.rzi.u32.f32 {W}, {A};",
    "prmt": f"prmt.b32 {W}, {A}, {B}, {C};",
    "lop3": f"lop3.b32 {W}, {A}, {B}, {C}, 0x6C;",
    "shf": f"shf.l.wrap.b32 {W}, {A}, {B}, {C};",
    "bfe": f"bfe.s32 {W}, {A}, {B}, {C};",
    "bfind": f"bfind.s32 {W}, {A};",
    "mul_hi": f"mul.hi.s32 {W}, {A}, {B};",
}  # fmt: skip
FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")
CODE = EXACT | {f"{name}_approx": f"{name}.approx.f32 {W}, {A};" for name in FUNCTIONS}


def word_program(name: str) -> Program:
    spec = ArraySpec((COUNT,), np.dtype(np.float32))
    arguments = (Operand(0), Operand(1), Operand(2), Result(0))
    launch = Launch(WordKernel(name), (COUNT // 128, 1, 1), arguments)
    return Program("words", (launch,), (spec,) * 3, (spec,))


def cases() -> Iterator[tuple[str, Program, list[np.ndarray], int]]:
    """Name, program, operands, and how many units in the last place the card may be away."""
    rng = np.random.default_rng()

    def words():
        codes = rng.integers(0, 1 << 32, COUNT, dtype=np.uint64).astype(np.uint32)
        moderate = rng.standard_normal(COUNT).astype(np.float32).view(np.uint32)
        return np.where(rng.random(COUNT) < 0.5, codes, moderate).view(np.float32)

    for name in EXACT:
        yield name, word_program(name), [words(), words(), words()], 0
    for name in FUNCTIONS:
        x = np.exp(rng.uniform(-20, 20, COUNT)).astype(np.float32)
        x = np.log(x) if name in ("ex2", "tanh") else x
        x = np.where((x > 0.5) & (x < 2), 4 * x, x) if name == "lg2" else x
        yield f"{name}_approx", word_program(f"{name}_approx"), [x, x, x], APPROX_ULP[name]

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    yield "scale", small.scale_program(1000, 3.0), [normal(1000)], 0
    yield "sum", small.sum_program(5), [normal(5, 256)], 0
    yield "ring", small.ring_program(7, 9, 3), [normal(7, 9, 64)], 0
    yield "rotate", small.rotate_program(3, 8), [normal(3, 8, 32)], 0
    yield "chain", small.chain_program(4, 5), [normal(4, 64)], 0
    yield "turns", small.turns_program(12), [normal(12, 32)], 0
    for spread in (0, 4, 30):
        a, b = (
            (normal(n, 512) * np.exp2(rng.integers(-spread, spread + 1, (n, 512)))).astype(BF16)
            for n in (16, 8)
        )
        yield f"matrix sums, spread {spread}", small.tile_program(512, BF16), [a, b], 0
    yield from layer_cases(rng)


def layer_cases(rng):
    """Kernels of the library; sigmoid and SiTU use approximate functions, so 1 ulp may slip in."""
    config = replace(MoEConfig.tiny(), num_experts=256, experts_per_token=8)
    x = rng.standard_normal((19, config.hidden_size)).astype(BF16)
    gate = (rng.standard_normal((config.num_experts, config.hidden_size)) / 16).astype(BF16)
    bias = (rng.standard_normal(config.num_experts) / 16).astype(np.float32)
    yield "router", router.route_program(config, 19), [x, gate, bias], 16
    config = replace(config, latent_size=512, num_experts=6, experts_per_token=3)
    target = replace(Target.named("h200"), num_sms=4)
    program = decode.decode_program(config, 17, 4, target)
    z, _, weights, gate_up, down = program.operands
    operands = [
        rng.standard_normal(z.shape).astype(BF16),
        np.stack([rng.permutation(6)[:3] for _ in range(17)]).astype(np.int32),
        rng.random(weights.shape).astype(np.float32),
        *(_packed(rng, spec.shape) for spec in (gate_up, down)),
    ]
    yield "experts", program, operands, 1


def _packed(rng, shape) -> np.ndarray:
    """Random weights in kernel order: any codes, scale bytes near one.

    A group of n chunks of 64 is 512 n bytes of codes and 32 n of scales; where the scales lie does
    not matter as long as no code byte becomes one, so every byte is a plausible scale.
    """
    return rng.integers(118, 124, shape).astype(np.uint8)
