"""The safetensors header: against the format's own library, and every way it can be broken."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from k3jax.checkpoint.header import TensorType, encode_header, read_header

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U32": np.uint32, "I32": np.int32,
    "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip


def random_array(rng, dtype, shape):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.frombuffer(rng.bytes(count), np.uint8)
    return (data & 1 if dtype is np.bool_ else data).view(dtype).reshape(shape)


def test_reads_what_the_library_writes(tmp_path):
    rng = np.random.default_rng()
    shapes = [(), (0,), (1,), (5, 3), (2, 0, 3), (7, 2, 4)]
    arrays = {
        f"{code}.{number}": random_array(rng, dtype, shape)
        for code, dtype in DTYPES.items()
        for number, shape in enumerate(shapes)
    }
    file = tmp_path / "all.safetensors"
    safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})
    tensors = read_header(file)
    assert tensors.keys() == arrays.keys()
    data = file.read_bytes()
    for name, array in arrays.items():
        got = tensors[name]
        assert got.type == (name.split(".")[0], array.shape)
        assert data[got.offset : got.offset + got.type.num_bytes] == array.tobytes()


def test_the_library_reads_what_we_write(tmp_path):
    rng = np.random.default_rng()
    arrays = {"b": random_array(rng, np.float32, (3, 2)), "a": random_array(rng, np.uint8, (5,))}
    types = [("b", TensorType("F32", (3, 2))), ("a", TensorType("U8", (5,)))]
    file = tmp_path / "ours.safetensors"
    file.write_bytes(encode_header(types) + b"".join(a.tobytes() for a in arrays.values()))
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == {"a", "b"}
        for name, array in arrays.items():
            assert opened.get_tensor(name).tobytes() == array.tobytes()
    assert [(t.name, t.type) for t in read_header(file).values()] == types


def raw(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN = {
    "empty": (b"", "it has 0 bytes, too few"),
    "short": (b"\x01\x00", "it has 2 bytes, too few"),
    "length past the end": (raw({}, length=1000), "claims 1000 bytes but the file ends"),
    "absurd length": (raw({}, length=1 << 62), f"claims {1 << 62} bytes, over 100000000"),
    "not json": (raw(b"{'a': 1}"), "header is not JSON"),
    "not text": (raw(b'{"\xff\xfe": 1}'), "header is not JSON"),
    "deep": (raw(b"[" * 100_000), "header is not JSON"),
    "not an object": (raw([1, 2]), "header is not a JSON object"),
    "name twice": (
        raw(b'{"a": ' + json.dumps(entry()).encode() + b', "a": {}}', b"1234"),
        r"header names \['a'\] twice",
    ),
    "entry not an object": (raw({"a": 3}), "tensor 'a' has the entry 3"),
    "key missing": (raw({"a": {"dtype": "U8", "shape": [1]}}), "tensor 'a' has the entry"),
    "unknown dtype": (raw({"a": entry("U7")}, b"1234"), "tensor 'a' has dtype 'U7'"),
    "dtype not text": (raw({"a": entry(8)}, b"1234"), "tensor 'a' has dtype 8"),
    "dtype a list": (raw({"a": entry(["U8"])}, b"1234"), r"tensor 'a' has dtype \['U8'\]"),
    "negative size": (raw({"a": entry(shape=(-4,))}, b"1234"), r"tensor 'a' has shape \[-4\]"),
    "fractional size": (raw({"a": entry(shape=(4.0,))}, b"1234"), r"'a' has shape \[4.0\]"),
    "boolean size": (raw({"a": entry(shape=(True,))}, b"1"), r"'a' has shape \[True\]"),
    "one offset": (raw({"a": entry(offsets=(4,))}, b"1234"), r"'a' has data_offsets \[4\]"),
    "negative offset": (raw({"a": entry(offsets=(-4, 0))}), r"'a' has data_offsets \[-4, 0\]"),
    "ends before it begins": (raw({"a": entry(offsets=(4, 0))}, b"1234"), "-4 bytes, but U8"),
    "bytes do not fit the shape": (
        raw({"a": entry("F32", (4,), (0, 4))}, b"1234"),
        r"'a' has data_offsets \[0, 4\], 4 bytes, but F32 \[4\] takes 16",
    ),
    "overflowing shape": (
        raw({"a": entry("U8", (1 << 40, 1 << 40))}, b"1234"),
        f"takes {1 << 80}",
    ),
    "overlap": (
        raw({"a": entry(), "b": entry(offsets=(3, 7))}, b"1234567"),
        "tensors 'a' and 'b' overlap",
    ),
    "gap": (
        raw({"a": entry(), "b": entry(offsets=(6, 10))}, b"1234567890"),
        "2 bytes before tensor 'b' belong to none",
    ),
    "gap at the front": (raw({"a": entry(offsets=(1, 5))}, b"12345"), "1 bytes before tensor 'a'"),
    "data cut short": (raw({"a": entry()}, b"123"), "tensor 'a' ends at byte .* it was cut short"),
    "data too long": (raw({"a": entry()}, b"123456"), "2 bytes after its last tensor"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_broken(tmp_path, content, message):
    file = tmp_path / "broken.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file} is not a sound safetensors file")
    assert str(caught.value).endswith("fetch or write it again")


def test_every_truncation_is_noticed(tmp_path):
    file = tmp_path / "whole.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32), "b": np.arange(3, dtype=np.uint8)}
    safetensors.numpy.save_file(arrays, file)
    whole = file.read_bytes()
    assert read_header(file).keys() == arrays.keys()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.safetensors is not a sound"):
            read_header(cut)


def test_no_flipped_byte_of_the_header_escapes_as_another_error(tmp_path):
    rng = np.random.default_rng()
    file = tmp_path / "flipped.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((2, 3), np.float32)}, file)
    whole = file.read_bytes()
    for position in range(len(whole) - 24):
        content = bytearray(whole)
        content[position] ^= 1 << rng.integers(8)
        file.write_bytes(content)
        try:
            tensors = read_header(file)
        except ValueError:
            continue
        # What still parses describes the data that is there, under another name perhaps.
        assert [tensor.type.num_bytes for tensor in tensors.values()] == [24]
