"""What the fused tail's mailboxes must survive or refuse, on CPU devices of one process."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.layer import moe_layer
from k3jax.ops.tail import fused
from k3jax.parallel import Parallel, run_sharded
from k3jax.plan import plan_layer
from k3jax.runtime.target import Target
from tests.ops.tail_oracle import EPS, draw, oracle
from tests.support import SMALL, bits, parallel_of, sharded_params, tokens_of

TP = 4
SPECS = (P("tp"), P("tp"), P(), P())


def tail(parallel, calls=1):
    """A step of so many calls that do not depend on each other, on rows of `calls` batches."""

    def local(group, latent, shared, gain, up_proj):
        rows = [jnp.split(array[0], calls) for array in (latent, shared)]
        cpu = Target.named("cpu")
        parts = [
            fused.fused_tail(*row, gain, up_proj, eps=EPS, group=group, target=cpu)
            for row in zip(*rows, strict=True)
        ]
        return jnp.concatenate(parts)[None]

    return lambda *arrays: run_sharded(local, parallel, SPECS, P("tp"), *arrays)


def arrays_of(tokens, rng=None):
    return draw(rng or np.random.default_rng(), TP, tokens, 64, 128)


def check(y, arrays):
    y = np.asarray(y)
    np.testing.assert_array_equal(bits(y), bits(y[[0] * TP]))
    wanted = oracle(*arrays)
    assert np.linalg.norm(y[0].astype(np.float64) - wanted) <= 1e-3 * np.linalg.norm(wanted)


def test_calls_of_one_program_that_are_independent_keep_apart():
    step = jax.jit(tail(parallel_of(TP), calls=8))
    for _ in range(5):
        arrays = arrays_of(8 * 6)
        check(step(*arrays), arrays)


def test_donated_inputs():
    step = jax.jit(tail(parallel_of(TP)), donate_argnums=1)
    for _ in range(4):
        latent, shared, *rest = arrays = arrays_of(5)
        placed = jax.device_put(shared, parallel_of(TP).sharding(P("tp")))
        check(step(latent, placed, *rest), arrays)
        assert placed.is_deleted()


def test_no_array_holds_mailboxes_so_none_can_be_donated_offloaded_or_deleted():
    before = {id(array) for array in jax.live_arrays()}
    step = jax.jit(tail(parallel_of(TP)))
    arrays = arrays_of(5)
    check(step(*arrays), arrays)
    for array in jax.live_arrays():
        if id(array) not in before:
            array.delete()
    for _ in range(4):
        check(step(*arrays), arrays)


def test_weights_in_host_memory():
    arrays = arrays_of(5)
    sharding = parallel_of(TP).sharding(P()).with_memory_kind("pinned_host")
    step = jax.jit(tail(parallel_of(TP)))
    up_proj = jax.device_put(arrays[3], sharding)
    assert up_proj.sharding.memory_kind == "pinned_host"
    check(step(*arrays[:3], up_proj), arrays)


def test_vmap_over_the_layer_is_refused():
    plan = plan_layer(SMALL, 3, tp=TP, tail="tail_fusion")
    parallel = parallel_of(TP)
    params = sharded_params(SMALL, parallel)
    batch = jnp.stack([tokens_of(3, SMALL.hidden_size, seed) for seed in range(2)])

    def layer(x):
        return moe_layer(params, x, config=SMALL, parallel=parallel, plan=plan)

    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(layer)(batch)
    one_by_one = jax.jit(lambda batch: jax.lax.map(layer, batch))(batch)
    for x, y in zip(batch, one_by_one, strict=True):
        np.testing.assert_array_equal(bits(y), bits(layer(x)))


def test_a_number_of_ranks_that_is_not_built_takes_the_next_tier_and_says_so_once(caplog):
    sizes = {"hidden_size": 96, "latent_size": 96, "expert_intermediate_size": 96}
    config = dataclasses.replace(SMALL, **sizes)
    params = sharded_params(config, parallel_of(3))
    x = tokens_of(3, config.hidden_size)
    with caplog.at_level("INFO", "k3jax"):
        for _ in range(2):
            moe_layer(params, x, config=config, parallel=parallel_of(3))
    (reason,) = [line for line in caplog.messages if "tail_fusion" in line]
    assert reason == (
        "tail=allreduce_overlap rather than tail_fusion: ranks=3 is not one of (2, 4, 8, 16)"
    )


def test_meshes_over_the_same_devices():
    """The same group by another mesh, and another order of ranks, which is another group."""
    devices = jax.devices()[:TP]
    meshes = [
        jax.make_mesh((TP,), ("tp",), (AxisType.Auto,), devices=devices),
        jax.make_mesh((1, TP), ("dp", "tp"), (AxisType.Auto,) * 2, devices=devices),
        jax.make_mesh((TP,), ("tp",), (AxisType.Auto,), devices=devices[::-1]),
    ]
    steps = [jax.jit(tail(Parallel(mesh))) for mesh in meshes]
    for _ in range(4):
        for step in steps:
            arrays = arrays_of(5)
            check(step(*arrays), arrays)


def test_programs_at_the_same_time_are_right_or_refused():
    parallel = parallel_of(TP)
    draws = [arrays_of(5) for _ in range(2)]
    steps = [jax.jit(tail(parallel)) for _ in draws]
    for step, arrays in zip(steps, draws, strict=True):
        check(step(*arrays), arrays)  # compiled
    wrong, start = [], threading.Barrier(len(draws))

    def run(step, arrays):
        start.wait()
        for _ in range(30):
            try:
                check(step(*arrays), arrays)
            except jax.errors.JaxRuntimeError as error:
                if "one after the other" not in str(error):
                    wrong.append(str(error))
            except AssertionError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(steps, draws, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for step, arrays in zip(steps, draws, strict=True):
        check(step(*arrays), arrays)
