"""PTX fundamental types and the NumPy arrays that stand for them.

A register is an array of shape [warps, 32] of unsigned integers (bool for predicates); a value
that is the same for all lanes may have shape [1, 1] or [warps, 1]. Operations view the bits as
they need.
"""

from dataclasses import dataclass

import numpy as np

LANES = 32


@dataclass(frozen=True)
class PtxType:
    """One of PTX's types.

    Attributes:
        name: without the dot, "s32".
        kind: "b", "u", "s", "f" or "pred"; packed types are "b".
        bits: width.
        raw: dtype of the register that holds it.
        view: dtype that gives the bits their meaning.
    """

    name: str
    kind: str
    bits: int
    raw: np.dtype
    view: np.dtype


def _types() -> dict[str, PtxType]:
    table = {"pred": PtxType("pred", "pred", 1, np.dtype(bool), np.dtype(bool))}
    for bits in (8, 16, 32, 64):
        unsigned = np.dtype(f"u{bits // 8}")
        for kind in "bus":
            view = np.dtype(f"i{bits // 8}") if kind == "s" else unsigned
            table[f"{kind}{bits}"] = PtxType(f"{kind}{bits}", kind, bits, unsigned, view)
    for name, bits in (("f16", 16), ("f32", 32), ("f64", 64)):
        table[name] = PtxType(name, "f", bits, np.dtype(f"u{bits // 8}"), np.dtype(f"f{bits // 8}"))
    for name, bits in (("bf16", 16), ("f16x2", 32), ("bf16x2", 32)):
        unsigned = np.dtype(f"u{bits // 8}")
        table[name] = PtxType(name, "b", bits, unsigned, unsigned)
    return table


TYPES = _types()
REGISTER_BITS = {name: max(kind.bits, 16) for name, kind in TYPES.items()} | {"pred": 1}
RAW = {1: np.dtype(bool), 8: np.dtype("u1")} | {b: np.dtype(f"u{b // 8}") for b in (16, 32, 64)}

F32_NAN = np.uint32(0x7FFFFFFF)
"""PTX arithmetic on f32 returns this NaN, whatever the inputs' payloads."""


def f32(bits: np.ndarray) -> np.ndarray:
    """Register bits as float32."""
    return bits.view(np.float32)


def from_f32(values: np.ndarray) -> np.ndarray:
    """float32 results as register bits, NaN made canonical."""
    bits = values.view(np.uint32)
    invalid = np.isnan(values)
    return np.where(invalid, F32_NAN, bits) if invalid.any() else bits


def flush(values: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormal float32 become zeros of the same sign."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values) if tiny.any() else values


def halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 16 bits of 32-bit registers, still as uint32."""
    return bits & np.uint32(0xFFFF), bits >> np.uint32(16)


def join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Inverse of `halves`; the inputs hold 16 significant bits."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
