"""The fused tail over two processes with a GPU each.

Run as a module, this file is one of the two processes.
"""

import functools
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.ops.tail import fused
from k3jax.parallel import Parallel, run_sharded
from k3jax.params import init_params, param_specs
from k3jax.plan import plan_layer
from k3jax.runtime.target import Target
from tests.ops.tail_oracle import EPS, draw, oracle
from tests.support import WHOLE_LAYER, bits, tokens_of
from tests.workers import Workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]

RANKS, LATENT, HIDDEN = 2, 3584, 7168
TOKENS = (1, 8, 9, 32, 33, 64, 128, 1, 128, 7)
TIMEOUT = 150
POLL_BUDGET = 1 << 20
"""Polls before a rank gives up: about a second."""

LAYER = MoEConfig(
    hidden_size=256,
    latent_size=512,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=512,
    num_shared_experts=1,
)
SPECS = (P("tp"), P("tp"), P(), P())


def test_two_processes(tmp_path):
    if len(jax.devices()) < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, there are {len(jax.devices())}")
    ended = Workers(__name__, RANKS, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false").wait(TIMEOUT)
    print(*(process.log for process in ended), sep="\n")
    assert [process.code for process in ended] == [0, -signal.SIGKILL]
    assert "all done" in ended[0].log


def place(mesh, arrays):
    return [
        jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index]
        )
        for array, spec in zip(arrays, SPECS, strict=True)
    ]


def make_step(mesh, captured):
    def local(group, latent, shared, gain, up_proj):
        y = fused.fused_tail(
            latent[0], shared[0], gain, up_proj, eps=EPS, group=group, target=Target.current()
        )
        return y[None]

    def step(*arrays):
        return run_sharded(local, Parallel(mesh), SPECS, P("tp"), *arrays)

    size = 1 if captured else 1_000_000
    jitted = jax.jit(step, compiler_options={"xla_gpu_graph_min_graph_size": size})

    def run(arrays):
        (shard,) = jitted(*place(mesh, arrays)).addressable_shards
        return np.asarray(shard.data)[0]

    return run


def check(y, arrays, folder, rank, number):
    wanted = oracle(*arrays)
    error = np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error <= 1e-3, f"step {number} of {len(wanted)} tokens on rank {rank}: {error}"
    np.save(folder / f"{number}-{rank}.tmp.npy", bits(y))
    (folder / f"{number}-{rank}.tmp.npy").rename(folder / f"{number}-{rank}.npy")


def check_layer(mesh):
    """A layer that makes its workspaces while it is traced, against one device."""
    parallel = Parallel(mesh)

    def put(array, spec):
        host = np.asarray(array)
        return jax.make_array_from_callback(
            host.shape, parallel.sharding(spec), lambda index: host[index]
        )

    def layer(params, x, **options):
        y = jax.jit(functools.partial(moe_layer, config=LAYER, **options))(params, x)
        return np.asarray(y.addressable_shards[0].data, np.float64)

    xla = {"router": "xla", "experts": "xla"}
    params = jax.jit(init_params, static_argnums=0)(LAYER, jax.random.key(0))
    x = tokens_of(9, LAYER.hidden_size)
    wanted = layer(params, x, plan=plan_layer(LAYER, 9, **xla))
    params = jax.tree.map(put, params, param_specs(LAYER, "tp"))
    plan = plan_layer(LAYER, 9, tp=RANKS, tail="tail_fusion", **xla)
    got = layer(params, put(x, P()), plan=plan, parallel=parallel)
    assert np.linalg.norm(got - wanted) <= WHOLE_LAYER * np.linalg.norm(wanted)


def programs_that_differ_are_named(mesh, rank, rng):
    """No kernel starts: the next step needs no reset."""
    step = make_step(mesh, captured=True)
    arrays = draw(rng, RANKS, 5 + rank, LATENT, HIDDEN)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"rank {rank} has 'tail_{5 + rank}'"):
        step(arrays)


def worker(address: str, rank: int, folder: Path) -> None:
    jax.distributed.initialize(
        address, RANKS, rank, local_device_ids=[rank], initialization_timeout=60,
        shutdown_timeout_seconds=5,
    )  # fmt: skip
    fused.POLL_BUDGET = POLL_BUDGET
    devices = jax.devices()
    mesh = jax.make_mesh((RANKS,), ("tp",), axis_types=(AxisType.Auto,))
    workspaces = fused.tail_workspaces(devices, LATENT, HIDDEN)
    workspaces.create()
    rng = np.random.default_rng([int(address.split(":")[1])])  # the same on both
    steps = {captured: make_step(mesh, captured) for captured in (True, False)}

    for number, tokens in enumerate(TOKENS):
        arrays = draw(rng, RANKS, tokens, LATENT, HIDDEN)
        for captured, step in steps.items():
            check(step(arrays), arrays, folder, rank, f"{number}-{captured}")
    workspaces.check()
    print(rank, "numbers are right", flush=True)
    check_layer(mesh)
    print(rank, "a layer is right", flush=True)
    programs_that_differ_are_named(mesh, rank, rng)
    workspaces.check()
    print(rank, "other programs are named", flush=True)

    step = steps[True]
    if rank == 1:
        time.sleep(3)  # the host of rank 0 waits, and its kernel does not
    for number in range(4):
        check(step(arrays), arrays, folder, rank, f"late-{number}")
    workspaces.check()
    print(rank, "right after one was late", flush=True)

    if rank == 1:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    started = []

    def run():
        while True:
            started.append(time.monotonic())
            step(arrays)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"process.* has ended.*start all"):
        run()
    print(f"step {len(started)}: the end of process 1 is named", flush=True)
    assert time.monotonic() - started[-2] < 10
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"process.* has ended.*start all"):
        step(arrays)  # nobody can recover without it
    for path in folder.glob("*-0.npy"):
        other = path.with_name(path.name.replace("-0.npy", "-1.npy"))
        np.testing.assert_array_equal(np.load(path), np.load(other))
    print("all done", flush=True)
    os._exit(0)  # the other process cannot come to a shutdown


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
