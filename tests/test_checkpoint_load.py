"""Loading a layer: the right numbers on the right devices, or one clear refusal.

The checkpoints here are written by the format's own library from arrays drawn here, so that
neither names nor layout come from the code under test.
"""

import dataclasses
import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

from k3jax.checkpoint import Checkpoint, load_layer
from k3jax.checkpoint.header import TensorType, encode_header, read_header
from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.parallel import Parallel
from k3jax.params import iter_infos
from tests import oracle
from tests.checkpoints import PREFIX, stacked
from tests.support import WHOLE_LAYER, parallel_of, tokens_of

CONFIG = MoEConfig(
    hidden_size=96,
    latent_size=64,
    num_experts=5,
    experts_per_token=2,
    expert_intermediate_size=512,
    num_shared_experts=1,
    num_layers=4,
    first_moe_layer=1,
)
SHARDS = 3
ROOT = Path(__file__).parent.parent
H, L, E, I, S = 96, 64, 5, 512, 512  # noqa: E741


def draw_layer(seed):
    """The tensors of one layer under their published names."""
    rng = np.random.default_rng(seed)

    def dense(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(ml_dtypes.bfloat16)

    tensors = {
        "gate.weight": dense(E, H),
        "gate.e_score_correction_bias": (0.1 * rng.standard_normal(E)).astype(np.float32),
        "routed_expert_down_proj.weight": dense(L, H),
        "routed_expert_norm.weight": (1 + dense(L)).astype(ml_dtypes.bfloat16),
        "routed_expert_up_proj.weight": dense(H, L),
        "shared_experts.gate_proj.weight": dense(S, H),
        "shared_experts.up_proj.weight": dense(S, H),
        "shared_experts.down_proj.weight": dense(H, S),
    }
    for expert in range(E):
        for matrix, rows, columns in (("w1", I, L), ("w3", I, L), ("w2", L, I)):
            stem = f"experts.{expert}.{matrix}.weight"
            tensors[f"{stem}_packed"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            tensors[f"{stem}_scale"] = rng.integers(120, 125, (rows, columns // 32), np.uint8)
    return tensors


def save(folder, layers, index=True):
    """Spreads {layer: tensors} over shards in random order."""
    named = {
        PREFIX.format(n) + name: a for n, tensors in layers.items() for name, a in tensors.items()
    }
    named["language_model.model.layers.0.mlp.gate_proj.weight"] = np.ones((2, 2), np.float32)
    named["language_model.model.layers.11.block_sparse_moe.gate.weight"] = np.ones(3, np.float32)
    placed = np.random.default_rng(0).integers(0, SHARDS, len(named))
    files = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(files):
        shard = {name: a for (name, a), n in zip(named.items(), placed, strict=True) if n == number}
        safetensors.numpy.save_file(shard, folder / file)
    if index:
        weight_map = {name: files[n] for name, n in zip(named, placed, strict=True)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def layers():
    return {1: draw_layer(1), 3: draw_layer(3)}


@pytest.fixture(scope="module")
def folder(layers, tmp_path_factory):
    return save(tmp_path_factory.mktemp("checkpoint") / "indexed", layers)


def whole_array(info, tensors):
    """The global array that an info stands for, stacked from the published tensors."""
    if info.name.startswith("experts."):
        return stacked(tensors, E)[
            info.name.replace("packed", "weight_packed").replace("scale", "weight_scale")
        ]
    return tensors[info.name if info.name.startswith("gate.") else f"{info.name}.weight"]


def check(params, tensors, parallel=None):
    """Every shard on every device, bit for bit."""
    for info, array in zip(iter_infos(CONFIG), jax.tree.leaves(params), strict=True):
        want = whole_array(info, tensors)
        assert array.shape == want.shape
        assert array.dtype == want.dtype
        if parallel is not None:
            sharding = parallel.sharding(info.spec(parallel.axis))
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), info.name


@pytest.mark.parametrize("layer", [1, 3])
def test_whole_layer_on_one_device(folder, layers, layer):
    params = load_layer(folder, layer, CONFIG)
    check(params, layers[layer])
    assert {array.sharding.num_devices for array in jax.tree.leaves(params)} == {1}


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_every_rank_holds_its_slice(folder, layers, tp, kind):
    parallel = parallel_of(tp, "model", kind)
    check(load_layer(folder, 1, CONFIG, parallel), layers[1], parallel)


@pytest.mark.parametrize(("shape", "axis"), [((2, 4), 1), ((8, 2), 0), ((2, 2, 4), 1)])
def test_replicas_over_other_axes(folder, layers, shape, axis):
    names = tuple("abc"[: len(shape)])
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    parallel = Parallel(mesh, names[axis])
    check(load_layer(folder, 1, CONFIG, parallel), layers[1], parallel)


def test_reversed_devices(folder, layers):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8][::-1]), ("tp",))
    check(load_layer(folder, 3, CONFIG, Parallel(mesh)), layers[3], Parallel(mesh))


def test_shards_without_index_and_single_file(tmp_path, layers):
    check(load_layer(save(tmp_path / "bare", layers, index=False), 3, CONFIG), layers[3])
    single = tmp_path / "one.safetensors"
    prefix = PREFIX.format(2)
    safetensors.numpy.save_file({prefix + n: a for n, a in layers[3].items()}, single)
    check(load_layer(single, 2, CONFIG), layers[3])
    check(load_layer(str(single), 2, CONFIG), layers[3])


def test_data_at_odd_offsets(tmp_path, layers):
    """Other writers do not align; the map of a column slice starts at any byte."""
    codes = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
    named = {"odd": np.zeros(3, np.uint8)}
    named |= {PREFIX.format(1) + name: array for name, array in layers[1].items()}
    types = [(n, TensorType(codes[a.dtype.name], a.shape)) for n, a in named.items()]
    file = tmp_path / "odd.safetensors"
    file.write_bytes(encode_header(types) + b"".join(a.tobytes() for a in named.values()))
    assert all(tensor.offset % 2 for tensor in read_header(file).values() if tensor.name != "odd")
    for parallel in (None, parallel_of(8)):
        check(load_layer(file, 1, CONFIG, parallel), layers[1], parallel)


def test_loaded_layer_computes_what_the_file_says(folder, layers):
    """The names mean what the format says: gate is w1, up is w3, low nibble first."""
    x = tokens_of(9, H)
    want = oracle.layer(stacked(layers[3], E), x, CONFIG)
    for parallel in (None, parallel_of(4)):
        params = load_layer(folder, 3, CONFIG, parallel)
        run = jax.jit(functools.partial(moe_layer, config=CONFIG, parallel=parallel))
        got = run(params, x)
        assert oracle.relative_error(got, want) < WHOLE_LAYER


def test_without_norm_and_shared_expert(tmp_path, layers):
    config = dataclasses.replace(CONFIG, latent_norm=False, num_shared_experts=0)
    tensors = {n: a for n, a in layers[1].items() if "norm" not in n and "shared" not in n}
    bare = save(tmp_path / "bare", {1: tensors})
    params = load_layer(bare, 1, config)
    assert params.routed_expert_norm is None
    assert params.shared_experts is None
    with pytest.raises(ValueError, match=r"unexpected: routed_expert_norm\.weight"):
        load_layer(save(tmp_path / "full", layers), 1, config)


# What is read.


SHARDED_AXIS = {
    ".w1.": 0,
    ".w3.": 0,
    ".w2.": 1,
    "shared_experts.gate_proj": 0,
    "shared_experts.up_proj": 0,
    "shared_experts.down_proj": 1,
}


def times_read(name):
    """The bias and the scales are looked at before anything is sent to a device."""
    return 2 if name.endswith(("_scale", "_bias")) else 1


class Meter(Checkpoint):
    """Counts how often each byte of each tensor is read."""

    def __init__(self, path):
        super().__init__(path)
        self.counts = {}

    def read_into(self, out, tensor, index):
        super().read_into(out, tensor, index)
        count = self.counts.setdefault(tensor.name, np.zeros(tensor.type.shape, int))
        with self._lock:
            count[index] += 1


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_every_byte_is_read_once_and_scales_twice(folder, layers, tp, monkeypatch):
    by_call = []
    preadv = os.preadv

    def counted(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        by_call.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    with Meter(folder) as meter:
        load_layer(meter, 1, CONFIG, parallel_of(tp))
    assert meter.counts.keys() == {PREFIX.format(1) + name for name in layers[1]}
    expected = by_rows = 0
    for name, array in layers[1].items():
        times = times_read(name)
        assert (meter.counts[PREFIX.format(1) + name] == times).all(), name
        expected += times * array.nbytes
        by_columns = tp > 1 and any(a == 1 and part in name for part, a in SHARDED_AXIS.items())
        by_rows += 0 if by_columns else times * array.nbytes
    assert meter.bytes_read == expected
    assert sum(by_call) == by_rows


def test_a_device_reads_its_share_alone(folder, layers):
    """With the mesh's other devices in another process, their bytes stay on disk."""
    port = free_port()
    words = [sys.executable, "-m", "tests.processes.load_share"]
    processes = [
        subprocess.Popen(
            [*words, str(number), str(port), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for number in range(2)
    ]
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    share = sum(
        times_read(name) * array.nbytes // (2 if any(part in name for part in SHARDED_AXIS) else 1)
        for name, array in layers[1].items()
    )
    assert [out.splitlines() for out, _ in ends] == 2 * [
        [
            str(share),
            "parallel.mesh has no device of this process; there is nothing to load",
        ]
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_an_index_spares_the_headers_of_other_shards(tmp_path, layers):
    save(tmp_path / "two", {1: layers[1]})
    index = tmp_path / "two" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (tmp_path / "two" / "broken.safetensors").write_bytes(b"not a shard")
    content["weight_map"][PREFIX.format(2) + "gate.weight"] = "broken.safetensors"
    content["weight_map"][PREFIX.format(3) + "gate.weight"] = "absent.safetensors"
    index.write_text(json.dumps(content))
    with Checkpoint(tmp_path / "two") as checkpoint:
        check(load_layer(checkpoint, 1, CONFIG), layers[1])
        with pytest.raises(ValueError, match=r"broken\.safetensors is not a sound"):
            load_layer(checkpoint, 2, CONFIG)
        with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
            load_layer(checkpoint, 3, CONFIG)


def test_a_closed_checkpoint_leaves_no_file_open(folder):
    before = set(os.listdir("/proc/self/fd"))
    with Checkpoint(folder) as checkpoint:
        load_layer(checkpoint, 1, CONFIG)
        assert len(os.listdir("/proc/self/fd")) >= len(before) + SHARDS
    load_layer(folder, 1, CONFIG)
    assert set(os.listdir("/proc/self/fd")) == before


def test_peak_memory_is_one_part_of_one_stack(tmp_path):
    """A stack is 96 MiB, one rank's part 12 MiB; the layer itself stays in host memory on CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.load_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    held, kept, extra = map(int, done.stdout.split())
    part = 96 * 1024 * 1024 // 8
    assert held > 3 * 8 * part
    assert 0.9 * held < kept < 1.25 * held, "more or less than the layer stayed in memory"
    assert extra < 2 * part, f"{extra / part:.1f} parts beside the layer"


def test_progress_bar_only_on_a_terminal(folder, capfd, monkeypatch):
    load_layer(folder, 1, CONFIG)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load_layer(folder, 1, CONFIG, progress=False)
    assert capfd.readouterr() == ("", "")
    load_layer(folder, 1, CONFIG)
    out, err = capfd.readouterr()
    assert out == ""
    assert "layer 1: 100%" in err


# What is refused.


@pytest.fixture
def no_device_work(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("device work before every check was done")

    monkeypatch.setattr(jax, "device_put", refuse)


def refused(path, message, layer=1, config=CONFIG, parallel=None, error=ValueError, **options):
    with pytest.raises(error, match=message) as caught:
        load_layer(path, layer, config, parallel, **options)
    return str(caught.value)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array):
    return lambda tensors: tensors.update({name: array})


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


MISMATCHES = {
    "missing": (drop("gate.weight"), "missing: gate.weight"),
    "missing of one expert": (
        drop("experts.3.w2.weight_scale"),
        "missing: experts.3.w2.weight_scale",
    ),
    "unexpected": (put("gate.scale", np.ones(3, np.float32)), "unexpected: gate.scale"),
    "an expert too many": (
        put("experts.5.w1.weight_packed", np.ones((I, L // 2), np.uint8)),
        "unexpected: experts.5.w1.weight_packed",
    ),
    "misnamed": (
        rename("experts.0.w1.weight_packed", "experts.0.w1.weight"),
        "unexpected: experts.0.w1.weight (misnamed experts.0.w1.weight_packed?)",
    ),
    "transposed": (
        put("routed_expert_down_proj.weight", np.ones((H, L), ml_dtypes.bfloat16)),
        "BF16 [96, 64], want BF16 [64, 96]: routed_expert_down_proj.weight",
    ),
    "flat": (
        put("gate.weight", np.ones(E * H, ml_dtypes.bfloat16)),
        "BF16 [480], want BF16 [5, 96]: gate.weight",
    ),
    "bias in bfloat16": (
        put("gate.e_score_correction_bias", np.ones(E, ml_dtypes.bfloat16)),
        "BF16 [5], want F32 [5]: gate.e_score_correction_bias",
    ),
    "nibbles in int8": (
        put("experts.2.w3.weight_packed", np.ones((I, L // 2), np.int8)),
        f"I8 [{I}, {L // 2}], want U8 [{I}, {L // 2}]: experts.2.w3.weight_packed",
    ),
    "nibbles not packed": (
        put("experts.2.w3.weight_packed", np.ones((I, L), np.uint8)),
        f"U8 [{I}, {L}], want U8 [{I}, {L // 2}]: experts.2.w3.weight_packed",
    ),
    "float16 for bfloat16": (
        put("shared_experts.up_proj.weight", np.ones((S, H), np.float16)),
        f"F16 [{S}, {H}], want BF16 [{S}, {H}]: shared_experts.up_proj.weight",
    ),
}


@pytest.mark.parametrize("index", [True, False], ids=["index", "bare"])
@pytest.mark.parametrize(("change", "line"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch(tmp_path, layers, change, line, index, no_device_work):
    tensors = dict(layers[1])
    change(tensors)
    message = refused(save(tmp_path / "bad", {1: tensors}, index), "nothing was loaded")
    assert message.startswith(f"layer 1 of {tmp_path / 'bad'} is not what config describes")
    lines = message.split("\n  ")[1:]
    assert line in lines
    assert len(lines) == (2 if "misnamed" in line else 1)


def test_all_mismatches_in_one_message(tmp_path, layers, no_device_work):
    tensors = dict(layers[1])
    for change in (
        drop("gate.weight"),
        drop("experts.0.w1.weight_scale"),
        drop("experts.1.w1.weight_scale"),
        drop("experts.4.w1.weight_scale"),
        rename("routed_expert_norm.weight", "routed_expert_norm.gain"),
        put("experts.1.w2.weight_packed", np.ones((1, 1), np.uint8)),
        put("experts.3.w2.weight_packed", np.ones((1, 1), np.uint8)),
    ):
        change(tensors)
    message = refused(save(tmp_path / "bad", {1: tensors}), "nothing was loaded")
    assert message.split("\n  ")[1:] == [
        "missing: experts.{0-1,4}.w1.weight_scale",
        "missing: gate.weight",
        "missing: routed_expert_norm.weight",
        "unexpected: routed_expert_norm.gain (misnamed routed_expert_norm.weight?)",
        f"U8 [1, 1], want U8 [{L}, {I // 2}]: experts.{{1,3}}.w2.weight_packed",
    ]


def test_another_config(folder, no_device_work):
    config = dataclasses.replace(CONFIG, num_experts=8)
    message = refused(folder, "nothing was loaded", config=config)
    assert "missing: experts.{5-7}.w1.weight_packed" in message
    assert "BF16 [5, 96], want BF16 [8, 96]: gate.weight" in message


def test_index_and_shards_disagree(tmp_path, layers, no_device_work):
    bad = save(tmp_path / "bad", {1: layers[1]})
    index = bad / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    named = content["weight_map"]
    first, *_, last = sorted(set(named.values()))
    gate = PREFIX.format(1) + "gate.weight"
    # The index names a tensor that no shard holds, misplaces one, and leaves one out.
    changed = {**named, PREFIX.format(1) + "gate.extra": first}
    changed[gate] = first if named[gate] != first else last
    index.write_text(json.dumps({"weight_map": changed}))
    message = refused(bad, "nothing was loaded")
    assert message.split("\n  ")[1:] == ["missing: gate.weight", "unexpected: gate.extra"]


def test_a_shard_holds_more_than_the_index_says(tmp_path, layers):
    """A stale copy in another shard is not read; a tensor outside the index is unexpected."""
    bad = save(tmp_path / "bad", {1: layers[1]})
    named = json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"]
    gate = PREFIX.format(1) + "gate.weight"
    for file in set(named.values()) - {named[gate]}:
        shard = safetensors.numpy.load_file(bad / file)
        stale = {gate: np.zeros_like(layers[1]["gate.weight"])}
        safetensors.numpy.save_file(shard | stale, bad / file)
    check(load_layer(bad, 1, CONFIG), layers[1])
    shard = safetensors.numpy.load_file(bad / named[gate])
    shard[PREFIX.format(1) + "gate.scale"] = np.ones(1, np.float32)
    safetensors.numpy.save_file(shard, bad / named[gate])
    message = refused(bad, "nothing was loaded")
    assert message.split("\n  ")[1:] == ["unexpected: gate.scale"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no 'weight_map' object"),
        ("{}", "has no 'weight_map' object"),
        ('{"weight_map": ["a"]}', "has no 'weight_map' object"),
        ('{"weight_map": {"a": 3}}', "places 'a' in 3; want a file name"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "places 'a' in '../b.safetensors'"),
        ('{"weight_map": {"a": "/etc/b.safetensors"}}', "places 'a' in '/etc/b.safetensors'"),
        ('{"weight_map": {"a": ""}}', "places 'a' in ''"),
    ],
)
def test_broken_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, re.escape(message))


def test_the_same_tensor_in_two_bare_shards(tmp_path, layers):
    save(tmp_path / "twice", {1: layers[1]}, index=False)
    name = PREFIX.format(1) + "gate.weight"
    extra = {name: layers[1]["gate.weight"]}
    safetensors.numpy.save_file(extra, tmp_path / "twice" / "old.safetensors")
    refused(tmp_path / "twice", rf"'{re.escape(name)}' is in both .*old\.safetensors")


def test_nothing_there(tmp_path):
    refused(tmp_path / "no", "no is not there; pass its folder", error=FileNotFoundError)
    refused(tmp_path, r"has neither model\.safetensors\.index\.json nor", error=FileNotFoundError)


def test_truncated_shard(tmp_path, layers, no_device_work):
    bad = save(tmp_path / "cut", {1: layers[1]})
    shard = sorted(bad.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refused(bad, "it was cut short")
    assert str(shard) in message
    assert "tensor 'language_model" in message


def test_shard_cut_while_open(tmp_path, layers):
    cut = save(tmp_path / "cut", {1: layers[1]})
    with Checkpoint(cut) as checkpoint:
        checkpoint.tensors(PREFIX.format(1))
        for shard in cut.glob("*.safetensors"):
            os.truncate(shard, 4096)
        refused(checkpoint, r"ended inside tensor .* while being read")


def test_which_layers(folder, no_device_work):
    refused(folder, r"layer=0 is dense \(its tensors are mlp\.\*\); the MoE layers are 1-3", 0)
    refused(folder, r"layer=4 is not in a model of 4; the MoE layers are 1-3", 4)
    refused(folder, r"layer=-1 is not in a model of 4; the MoE layers are 1-3", -1)
    refused(folder, r"layer=2 is not in .*indexed, which holds layers 1,3,11", 2)


def test_no_layer_at_all(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "a.safetensors")
    refused(tmp_path, r"layer=1 is not in .*, which has no tensor language_model\.model\.layers\.1")


def test_parallel_that_does_not_fit(folder, no_device_work):
    refused(folder, "tp=3 does not divide this config", parallel=parallel_of(3))
    abstract = Parallel(parallel_of(2).mesh.abstract_mesh)
    refused(folder, "parallel.mesh is AbstractMesh", parallel=abstract, error=TypeError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bias_that_is_not_finite(tmp_path, layers, value, no_device_work):
    bias = layers[1]["gate.e_score_correction_bias"].copy()
    bias[[1, 2, 4]] = value
    tensors = {**layers[1], "gate.e_score_correction_bias": bias}
    bad = save(tmp_path / "bad", {1: tensors})
    refused(bad, r"layer 1 of .*e_score_correction_bias is not finite for experts 1-2,4;")
    refused(bad, "is not finite", parallel=parallel_of(8), allow_nan_scales=True)


@pytest.mark.parametrize("tp", [None, 8])
def test_nan_scales(tmp_path, layers, tp, monkeypatch):
    tensors = dict(layers[1])
    for name in ("experts.0.w1", "experts.1.w1", "experts.4.w2"):
        scale = tensors[f"{name}.weight_scale"].copy()
        scale[-1, -1] = 255
        tensors[f"{name}.weight_scale"] = scale
    bad = save(tmp_path / "bad", {1: tensors})
    parallel = parallel_of(tp) if tp else None
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", None)
        message = refused(bad, r"scale byte 255 \(NaN\)", parallel=parallel)
    assert "in experts.4.w2.weight_scale, experts.{0-1}.w1.weight_scale; nothing" in message
    assert "allow_nan_scales=True" in message
    params = load_layer(bad, 1, CONFIG, parallel, allow_nan_scales=True)
    check(params, tensors, parallel)
    values = np.asarray(params.experts.w2.dequantize(jnp.float32))
    assert np.isnan(values[4, -1, -32:]).all()
    assert np.isnan(values).sum() == 32
