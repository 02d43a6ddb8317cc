"""Whole programs compiled for 4 and 8 H200 and B200 on a machine that has none."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.runtime import ffi
from k3jax.runtime.ffi import call_program, platform_choice
from k3jax.runtime.target import Target
from tests.device_free import compile_apart, gpu_mesh, instructions
from tests.runtime.gpu_programs import COUNT, ROUNDS, tallies
from tests.runtime.toy import chain_program

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA plugin (no CUDA libraries)")

WIDTH = 1024
LAYERS = 4


def lower_layers(kind: str, num_devices: int):
    """Layers of one of our calls between products and sums over the devices, tensor parallel."""
    mesh = gpu_mesh(kind, num_devices)
    target = Target.named(kind)

    def chain(x):
        return call_program(chain_program(WIDTH, 2.0, 3.0), x, target=target)[0]

    apply = platform_choice(chain, lambda x: 3.0 * (2.0 * x) + 1.0)

    def layers(x, weights):
        for _ in range(LAYERS):
            x = apply(jnp.tanh(x @ weights))
        return x

    function = jax.shard_map(layers, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
    x = jax.ShapeDtypeStruct(
        (num_devices * WIDTH,), jnp.float32, sharding=NamedSharding(mesh, P("tp"))
    )
    weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(function).lower(x, weights)


def lower_tallies(kind: str):
    """Two calls alike and one in a loop, of a program that keeps memory."""
    mesh = gpu_mesh(kind, 1)
    x = jax.ShapeDtypeStruct((COUNT,), jnp.float32, sharding=NamedSharding(mesh, P()))
    return jax.jit(tallies).lower(x)


def lower_unregistered(kind: str):
    """The same in a process that never told XLA about our handlers."""
    ffi.register = lambda: None
    return lower_layers(kind, 4)


def lower_garbled(kind: str):
    """The same with words that no release of k3jax wrote."""
    ffi.serialize_program = functools.partial(_without_last_word, ffi.serialize_program)
    return lower_layers(kind, 4)


def _without_last_word(serialize, program, compiled):
    attributes = serialize(program, compiled)
    return attributes | {"words": attributes["words"][:-1]}


@pytest.mark.parametrize("kind", ["h200", "b200"])
@pytest.mark.parametrize("num_devices", [4, 8])
def test_our_calls_share_one_command_buffer(kind, num_devices, tmp_path):
    report = compile_apart(lower_layers, tmp_path, kind, num_devices)
    buffers = report.command_buffers_of("kCustomCall")
    assert len(buffers) == LAYERS
    assert len(set(buffers)) == 1
    assert buffers[0] is not None
    assert report.hlo.count('custom_call_target="k3jax_launch"') == LAYERS
    assert "all-gather" not in report.hlo
    weight_bytes = 4 * WIDTH * WIDTH
    assert report.temp_bytes < 2 * weight_bytes


def test_calls_that_keep_memory_are_neither_merged_nor_unrolled(tmp_path):
    report = compile_apart(lower_tallies, tmp_path, "h200")
    assert report.hlo.count('custom_call_target="k3jax_launch"') == 3
    (loop,) = instructions(report.hlo, "while")
    assert f'"known_trip_count":{{"n":"{ROUNDS}"}}' in loop


def test_missing_handler_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RuntimeError, match="k3jax_launch"):
        compile_apart(lower_unregistered, tmp_path, "h200")


def test_garbled_program_is_refused_at_compile_time(tmp_path):
    with pytest.raises(RuntimeError, match=r"k3jax program 'chain' ends before its offset"):
        compile_apart(lower_garbled, tmp_path, "b200")
