"""Loading a layer: the right numbers on the right devices, and no byte more than that."""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

from k3jax.checkpoint import Checkpoint, load_layer
from k3jax.checkpoint.header import TensorType, encode_header, read_header
from k3jax.layer import moe_layer
from k3jax.parallel import Parallel
from tests import oracle
from tests.checkpoints import (
    CONFIG,
    PREFIX,
    SHARDED_AXIS,
    SHARDS,
    E,
    H,
    Meter,
    check,
    draw_layer,
    save,
    stacked,
    times_read,
)
from tests.support import WHOLE_LAYER, parallel_of, tokens_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def layers():
    return {1: draw_layer(1), 3: draw_layer(3)}


@pytest.fixture(scope="module")
def folder(layers, tmp_path_factory):
    return save(tmp_path_factory.mktemp("checkpoint") / "indexed", layers)


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
