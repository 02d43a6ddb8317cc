"""`cvt`: between integers, floats and packed small floats."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..types import TYPES, PtxType, flush, from_f32, halves, join
from .floating import from_f64, round_f64
from .minifloat import FORMATS, decode_ue8m0, encode_ue8m0
from .packed import NAN16, narrow, widen

_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "rs")
_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_SMALL = {f"{name}x2": name for name in FORMATS}
_PAIRS = ("f16x2", "bf16x2")


@instruction("cvt")
def cvt(b: Binder) -> Op:
    """Conversion `cvt.to.from`."""
    if len(b.modifiers) < 2:
        raise b.unknown("cvt needs two types")
    source, target = b.modifiers.pop(), b.modifiers.pop()
    if b.flag("pack"):
        raise b.unknown("cvt.pack is not implemented")
    rounding = b.one_of(*_ROUNDINGS, default="")
    flags = {name: b.flag(name) for name in ("ftz", "sat", "satfinite", "relu")}
    if rounding in ("rs", "rna"):
        raise b.unknown(f"cvt.{rounding} is not implemented")
    if {"ue8m0x2", "e2m1x2"} & {target, source}:
        b.require("sm_100", "sm_103")
    if "ue8m0x2" in (target, source):
        return _ue8m0(b, target, source, rounding, flags)
    if target in _SMALL:
        return _to_small(b, target, source, rounding, flags)
    if source in _SMALL:
        return _from_small(b, target, source, flags)
    if target in _PAIRS:
        return _to_pair(b, target, source, rounding, flags)
    if target not in TYPES or source not in TYPES:
        raise b.unknown(f"cvt.{target}.{source} is not implemented")
    return _scalar(b, TYPES[target], TYPES[source], rounding, flags)


def _is_float(kind: PtxType) -> bool:
    return kind.kind == "f" or kind.name == "bf16"


def _scalar(b: Binder, to: PtxType, source: PtxType, rounding: str, flags) -> Op:
    d, x = b.operands
    if _is_float(source) and _is_float(to):
        fn = _float_to_float(b, to, source, rounding, flags)
    elif _is_float(source):
        fn = _float_to_int(b, to, source, rounding, flags)
    elif _is_float(to):
        fn = _int_to_float(b, to, source, rounding, flags)
    else:
        fn = _int_to_int(to, source, flags["sat"])
    slot = b.src(x, _source_bits(b, x, source), source.kind)
    dst = b.dst(d, max(to.bits, 16), wider=True)
    raw = np.dtype(f"u{b.slots.bits[dst] // 8}")
    signed = to.kind == "s"

    def run(bits):
        result = fn(bits)
        if result.dtype.itemsize == raw.itemsize:
            return np.array(result.view(raw))
        return (result.view(to.view) if signed else result).astype(raw)

    return b.pure(run, [dst], [slot])


def _source_bits(b: Binder, operand, kind: PtxType) -> int:
    """Width of the register a narrow source sits in."""
    slots = b.slots
    name = getattr(operand, "name", None)
    if name in slots.registers:
        return max(kind.bits, slots.bits[slots.registers[name]])
    return max(kind.bits, 16)


def _integers(bits: np.ndarray, kind: PtxType) -> np.ndarray:
    """The low bits of registers with the meaning of an integer type."""
    return bits.astype(kind.raw).view(kind.view)


def _floats(bits: np.ndarray, kind: PtxType) -> np.ndarray:
    if kind.bits == 16:
        return widen(bits, kind.name)
    return bits.view(kind.view)


def _int_to_int(to: PtxType, source: PtxType, saturate: bool):
    def fn(bits):
        values = _integers(bits, source)
        if not saturate:
            return values.astype(to.view)
        limit = np.iinfo(to.view)
        low, high = (
            max(limit.min, np.iinfo(values.dtype).min),
            min(limit.max, np.iinfo(values.dtype).max),
        )
        return np.clip(values, low, high).astype(to.view)

    return fn


def _float_to_int(b: Binder, to: PtxType, source: PtxType, rounding: str, flags):
    if rounding not in _INTEGER_ROUNDING:
        raise b.unknown("a float-to-integer cvt needs .rni, .rzi, .rmi or .rpi")
    limit = np.iinfo(to.view)

    def fn(bits):
        values = _floats(bits, source)
        if flags["ftz"]:
            values = flush(values)
        values = _INTEGER_ROUNDING[rounding](values.astype(np.float64))
        invalid = np.isnan(values)
        over, under = values >= float(limit.max), values <= float(limit.min)
        safe = np.where(invalid | over | under, 0.0, values).astype(to.view)
        result = np.where(over, to.view.type(limit.max), safe)
        result = np.where(under, to.view.type(limit.min), result)
        # PTX: NaN gives 0 for 32-bit and narrower targets of a float32, else 0x80...0.
        nan = limit.min if to.kind == "s" and (to.bits == 64 or source.bits == 64) else 0
        if to.kind == "u" and (to.bits == 64 or source.bits == 64):
            nan = 1 << (to.bits - 1)
        return np.where(invalid, to.view.type(nan), result).view(to.raw)

    return fn


def _int_to_float(b: Binder, to: PtxType, source: PtxType, rounding: str, flags):
    if rounding not in ("rn", "rz", "rm", "rp"):
        raise b.unknown("an integer-to-float cvt needs a rounding")
    if rounding != "rn" and (source.bits == 64 or to.bits != 32):
        raise b.unknown(f"this cvt.{rounding} is not implemented")

    def fn(bits):
        values = _integers(bits, source)
        if to.bits == 16:
            return narrow(values.astype(np.float64), to.name).astype(np.uint16)
        if rounding != "rn":
            return round_f64(values.astype(np.float64), rounding).view(np.uint32)
        result = values.astype(to.view)
        if flags["sat"]:
            result = np.clip(result, 0, 1).astype(to.view)
        return result.view(to.raw)

    return fn


def _float_to_float(b: Binder, to: PtxType, source: PtxType, rounding: str, flags):
    whole = _INTEGER_ROUNDING.get(rounding)
    narrower = to.bits < source.bits or (to.bits == source.bits and to.name != source.name)
    directed = to.bits == 16 and rounding not in ("rn", "") and whole is None
    if directed and (rounding != "rz" or source.bits != 32):
        raise b.unknown(f"this cvt.{rounding} is not implemented")
    if narrower and not rounding:
        raise b.unknown("a narrowing float cvt needs a rounding")

    def fn(bits):
        values = _floats(bits, source)
        if flags["ftz"] and source.bits == 32:
            values = flush(values)
        if flags["relu"]:
            values = _rectify(values)
        if whole is not None:
            values = whole(values)
        if flags["sat"]:
            values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)
        if to.bits == 16:
            if rounding == "rz":
                return _truncate(values, to.name).astype(np.uint16)
            return narrow(values, to.name).astype(np.uint16)
        if to.bits == 64:
            return from_f64(values.astype(np.float64))
        single = round_f64(values, rounding) if source.bits == 64 else values.astype(np.float32)
        if flags["ftz"]:
            single = flush(single)
        return from_f32(single)

    return fn


def _rectify(values: np.ndarray) -> np.ndarray:
    """`.relu`: negative values and -0 become +0; NaN stays."""
    return np.where(np.signbit(values) & ~np.isnan(values), values.dtype.type(0), values)


def _truncate(values: np.ndarray, name: str) -> np.ndarray:
    """float32 to 16 bits toward zero."""
    if name == "bf16":
        bits = values.view(np.uint32) >> np.uint32(16)
    else:
        bits = narrow(values, name)
        beyond = np.abs(widen(bits, name)) > np.abs(values)
        bits = np.where(beyond, bits - np.uint32(1), bits)
    return np.where(np.isnan(values), NAN16, bits)


def _two_floats(b: Binder, source: str):
    """Destination operand and the slots of the high and low float32 sources."""
    if source != "f32":
        raise b.unknown(f"a packed cvt from {source} is not implemented")
    d, high, low = b.operands
    return d, [b.src(high, 32, "f"), b.src(low, 32, "f")]


def _to_pair(b: Binder, target: str, source: str, rounding: str, flags) -> Op:
    name = target.removesuffix("x2")
    if rounding not in ("rn", "rz"):
        raise b.unknown("cvt to a pair needs .rn or .rz")
    d, srcs = _two_floats(b, source)

    def one(bits):
        values = bits.view(np.float32)
        if flags["relu"]:
            values = _rectify(values)
        result = _truncate(values, name) if rounding == "rz" else narrow(values, name)
        if flags["satfinite"]:
            inf, top = (0x7F80, 0x7F7F) if name == "bf16" else (0x7C00, 0x7BFF)
            sign = result & np.uint32(0x8000)
            result = np.where((result & 0x7FFF) == inf, sign | np.uint32(top), result)
        return result

    return b.pure(lambda high, low: join(one(low), one(high)), [b.dst(d, 32)], srcs)


def _to_small(b: Binder, target: str, source: str, rounding: str, flags) -> Op:
    form = FORMATS[_SMALL[target]]
    if rounding != "rn" or not flags["satfinite"]:
        raise b.unknown("cvt to a small float needs .rn.satfinite")
    width = 4 if target == "e2m1x2" else 8
    if source in _PAIRS:
        name = source.removesuffix("x2")
        d, x = b.operands
        srcs = [b.src(x, 32)]
        split = lambda bits: [widen(h, name) for h in reversed(halves(bits))]  # noqa: E731
    else:
        d, srcs = _two_floats(b, source)
        split = lambda high, low: (high.view(np.float32), low.view(np.float32))  # noqa: E731

    def fn(*bits):
        high, low = (form.encode(v, flags["relu"]) for v in split(*bits))
        return (low | high << np.uint32(width)).astype(np.uint16)

    return b.pure(fn, [b.dst(d, 8 if width == 4 else 16, wider=True)], srcs)


def _from_small(b: Binder, target: str, source: str, flags) -> Op:
    form = FORMATS[_SMALL[source]]
    name = target.removesuffix("x2")
    if target not in _PAIRS:
        raise b.unknown(f"cvt.{target}.{source} does not exist")
    width = 4 if source == "e2m1x2" else 8
    d, x = b.operands

    def one(codes):
        values = form.decode(codes & np.uint16((1 << width) - 1))
        if flags["relu"]:
            values = _rectify(values)
        return narrow(values, name)

    fn = lambda bits: join(one(bits), one(bits >> np.uint16(width)))  # noqa: E731
    return b.pure(fn, [b.dst(d, 32)], [b.src(x, 16)])


def _ue8m0(b: Binder, target: str, source: str, rounding: str, flags) -> Op:
    if target == "bf16x2":
        d, x = b.operands

        def widened(bits):
            low, high = bits & np.uint16(0xFF), bits >> np.uint16(8)
            return join(narrow(decode_ue8m0(low), "bf16"), narrow(decode_ue8m0(high), "bf16"))

        return b.pure(widened, [b.dst(d, 32)], [b.src(x, 16)])
    if rounding not in ("rz", "rp") or not flags["satfinite"]:
        raise b.unknown("cvt to ue8m0x2 needs .rz or .rp, and .satfinite")
    up = rounding == "rp"
    if source == "bf16x2":
        d, x = b.operands
        srcs = [b.src(x, 32)]
        split = lambda bits: [widen(h, "bf16") for h in reversed(halves(bits))]  # noqa: E731
    else:
        d, srcs = _two_floats(b, source)
        split = lambda high, low: (high.view(np.float32), low.view(np.float32))  # noqa: E731

    def fn(*bits):
        high, low = (encode_ue8m0(v, up) for v in split(*bits))
        return (low | high << np.uint32(8)).astype(np.uint16)

    return b.pure(fn, [b.dst(d, 16)], srcs)
