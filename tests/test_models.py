"""The stack of MoE layers and its script, from a checkpoint on disk to outputs."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import models.kimi_k3
from k3jax.checkpoint import write_checkpoint
from k3jax.checkpoint.header import TensorType, encode_header
from models.kimi_k3 import (
    LayerParams,
    decoder_layer,
    init_layers,
    load_layers,
    run_layers,
    scan_layers,
    stack_layers,
)
from models.kimi_k3.generate import main
from tests import oracle
from tests.support import (
    TINY,
    WHOLE_LAYER,
    bits,
    data_and_tensor_parallel,
    numpy_params,
    parallel_of,
    params_of,
    tokens_of,
)

LAYERS, TOKENS = (1, 2), 6
NORM = "language_model.model.layers.{}.post_attention_layernorm.weight"

TWO_STACKS = 1.5e-2
"""Relative L2 error allowed between two runs of two layers whose sums take another order.

Each run may be WHOLE_LAYER away from the exact value, in each layer.
"""


def attention(layer, x):
    """Not attention, but a branch that depends on the layer."""
    return jnp.roll(x, 1, axis=-1) * jnp.asarray(layer, x.dtype)


def gain_of(seed):
    key = jax.random.key(100 + seed)
    return (1 + 0.2 * jax.random.normal(key, TINY.hidden_size)).astype(jnp.bfloat16)


@functools.cache
def layers_of():
    return {layer: LayerParams(gain_of(layer), params_of(TINY, layer)) for layer in LAYERS}


@functools.cache
def jitted(function, **options):
    return jax.jit(functools.partial(function, config=TINY, **options))


def assert_same(got, want):
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY, progress=False)
    return folder


def add_norm(folder, layer, array, dtype):
    """A further shard, as the index sees it, with the norm of one layer."""
    name, shard = NORM.format(layer), "model-norm.safetensors"
    header = encode_header([(name, TensorType(dtype, array.shape))])
    (folder / shard).write_bytes(header + np.asarray(array).tobytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][name] = shard
    index.write_text(json.dumps(content))


def test_a_layer_against_the_oracle():
    x, layer = tokens_of(TOKENS, TINY.hidden_size), 2
    got = jitted(decoder_layer, attention=attention)(layers_of()[layer], x, layer)
    stream = np.asarray(x, np.float64)
    stream = oracle.bf16(stream + oracle.bf16(np.roll(stream, 1, axis=-1) * layer))
    gain = np.asarray(gain_of(layer), np.float64)
    normed = oracle.bf16(oracle.rms_norm(stream, gain, TINY.rms_norm_eps))
    moe = oracle.layer(numpy_params(params_of(TINY, layer), TINY), normed, TINY)
    assert oracle.relative_error(got, stream + moe) < WHOLE_LAYER


def test_layers_run_in_order_of_their_index():
    parallel = parallel_of(8)
    x = tokens_of(TOKENS, TINY.hidden_size)
    backwards = dict(reversed(layers_of().items()))
    got = jitted(run_layers, parallel=parallel, attention=attention)(backwards, x)
    one = jitted(decoder_layer, parallel=parallel, attention=attention)
    for layer in LAYERS:
        x = one(layers_of()[layer], x, layer)
    assert_same(got, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_scanned_layers_follow_the_loop(kind):
    parallel = data_and_tensor_parallel(kind)
    x = tokens_of(TOKENS, TINY.hidden_size)
    stacked = stack_layers(layers_of())
    got = jitted(scan_layers, parallel=parallel, attention=attention, first_layer=1)(stacked, x)
    want = jitted(run_layers, parallel=parallel, attention=attention)(layers_of(), x)
    assert oracle.relative_error(got, want) < TWO_STACKS  # XLA may keep more bits across layers


def test_random_layers_are_placed_and_differ():
    parallel = parallel_of(8)
    layers = init_layers(TINY, LAYERS, jax.random.key(0), parallel)
    first, second = (layers[layer].moe.experts.w1.packed for layer in LAYERS)
    assert first.sharding.spec[1] == "tp"
    assert not np.array_equal(first, second)


def test_loaded_layers_as_the_readme_runs_them(checkpoint):
    text = (Path(models.kimi_k3.__file__).parent / "README.md").read_text()
    x = tokens_of(TOKENS, TINY.hidden_size)
    names = {"path": checkpoint, "attention": attention, "x": x}
    exec(text.split("```python")[1].split("```")[0], names)  # loads over eight devices, runs
    layers = names["layers"]
    assert list(layers) == list(LAYERS)
    assert layers[1].moe.experts.w2.packed.sharding.spec[2] == "tp"
    assert np.all(np.asarray(layers[1].post_attention_layernorm) == 1)  # not in this checkpoint
    alone = load_layers(checkpoint, LAYERS, TINY, progress=False)
    want = jitted(run_layers, attention=attention)(alone, x)
    assert oracle.relative_error(names["y"], want) < TWO_STACKS


def test_the_norm_of_a_layer_is_read(tmp_path):
    write_checkpoint(tmp_path, TINY, [1], progress=False)
    add_norm(tmp_path, 1, gain_of(1), "BF16")
    layers = load_layers(tmp_path, [1], TINY, progress=False)
    assert_same(layers[1].post_attention_layernorm, gain_of(1))


def test_a_norm_that_does_not_fit_is_named(tmp_path):
    write_checkpoint(tmp_path, TINY, [1], progress=False)
    add_norm(tmp_path, 1, np.ones(TINY.hidden_size, np.float32), "F32")
    with pytest.raises(ValueError, match=r"post_attention_layernorm\.weight is F32 \[256\], want"):
        load_layers(tmp_path, [1], TINY, progress=False)


def test_the_dense_layer_is_refused(checkpoint):
    with pytest.raises(ValueError, match="layer=0"):
        load_layers(checkpoint, [0], TINY, progress=False)


def test_generate_from_a_checkpoint(checkpoint, tmp_path, capsys):
    prompt = np.asarray(tokens_of(2 * TOKENS, TINY.hidden_size), np.float32)
    prompt = prompt.reshape(2, TOKENS, TINY.hidden_size)
    np.save(tmp_path / "prompt.npy", prompt)
    files = f"--prompt {tmp_path}/prompt.npy --output {tmp_path}/y.npy --checkpoint {checkpoint}"
    assert main(f"{files} --tp 8 --steps 2".split()) == 0
    printed = capsys.readouterr().out
    assert "prefill: 12 tokens, tp=8" in printed
    assert "decode step 2 of 2 tokens:" in printed

    got = np.load(tmp_path / "y.npy")
    assert got.shape == (2, 3, TINY.hidden_size)
    step = jitted(run_layers)
    alone = load_layers(checkpoint, LAYERS, TINY, progress=False)
    x = jnp.asarray(prompt, jnp.bfloat16)
    want = np.asarray(step(alone, x)[:, -1], np.float64)
    assert oracle.relative_error(got[:, 0], want) < TWO_STACKS
    for index in (1, 2):
        before = got[:, index - 1].astype(np.float64)
        normed = oracle.rms_norm(before, 1.0, TINY.rms_norm_eps)
        want = step(alone, jnp.asarray(normed, jnp.bfloat16)[:, None])[:, 0]
        assert oracle.relative_error(got[:, index], want) < TWO_STACKS


def test_generate_says_when_an_output_is_not_finite(checkpoint, tmp_path, capsys):
    np.save(tmp_path / "prompt.npy", np.full((1, 1, TINY.hidden_size), np.nan, np.float32))
    files = f"--prompt {tmp_path}/prompt.npy --checkpoint {checkpoint}"
    assert main(f"{files} --layers 1 --steps 0".split()) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tp 3", "tp=3 does not divide this config"),
        ("--layers 3", "--layers 3 is more than the 2 MoE layers"),
        ("--checkpoint {}/nowhere", "No such file or directory"),
        ("--tp 64", "tp=64 needs 64 devices"),
        ("--prompt {}/flat.npy", r"want \[B, P, 256\]"),
    ],
)
def test_generate_names_what_does_not_fit(arguments, message, tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((3, TINY.hidden_size), np.float32))
    with pytest.raises(SystemExit, match=message):
        main(arguments.format(tmp_path).split())
