"""The fused tail over two processes of two CPU devices: misuse, failures, and a process that dies.

Run as a module, this file is one of the two processes.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.layer import moe_layer
from k3jax.ops.tail import fused
from k3jax.parallel import Parallel, run_sharded
from k3jax.params import abstract_params, param_specs
from k3jax.plan import plan_layer
from k3jax.runtime import processes
from tests.ops.tail_oracle import EPS, draw, oracle
from tests.support import SMALL
from tests.workers import Workers

PROCESSES, DEVICES, TP = 2, 2, 4
LATENT, HIDDEN = 64, 128
SPECS = (P("tp"), P("tp"), P(), P())
TIMEOUT = 150


def test_two_processes(tmp_path):
    ended = Workers(__name__, PROCESSES, tmp_path).wait(TIMEOUT)
    codes = [process.code for process in ended]
    assert codes == [0, -signal.SIGKILL], "\n".join(process.log for process in ended)
    for process in ended:  # no name outlives its processes
        assert not list(Path("/dev/shm").glob(f"k3jax-{process.pid}-*"))


class Steps:
    """Steps of one mesh over both processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        mesh = jax.make_mesh((TP,), ("tp",), axis_types=(AxisType.Auto,))
        self.parallel = Parallel(mesh)
        self.rng = np.random.default_rng(20)  # the same on both
        fused.tail_workspaces(jax.devices(), LATENT, HIDDEN).create()
        self.tail = jax.jit(self.on_ranks(lambda group, *rest: self.call(group, *rest)))

    def call(self, group, latent, shared, gain, up_proj):
        return fused.fused_tail_host(
            latent[0], shared[0], gain, up_proj, eps=EPS, group=group, budget_ms=3000
        )

    def on_ranks(self, function):
        def local(group, *arrays):
            return function(group, *arrays)[None]

        return lambda *arrays: run_sharded(local, self.parallel, SPECS, P("tp"), *arrays)

    def place(self, arrays):
        return [
            jax.make_array_from_callback(
                array.shape,
                NamedSharding(self.parallel.mesh, spec),
                lambda index, array=array: array[index],
            )
            for array, spec in zip(arrays, SPECS, strict=True)
        ]

    def draw(self, tokens=3):
        return draw(self.rng, TP, tokens, LATENT, HIDDEN)

    def check(self, tokens=3):
        arrays = self.draw(tokens)
        y = self.tail(*self.place(arrays))
        for shard in y.addressable_shards:
            got, wanted = np.asarray(shard.data, np.float64)[0], oracle(*arrays)
            assert np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted)

    def fails(self, step, arrays, message):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            step(*self.place(arrays)).block_until_ready()


def other_layers_are_named_while_tracing(steps: Steps) -> None:
    def trace(num_tokens, tail):
        parallel = steps.parallel
        params = jax.tree.map(
            lambda array, spec: jax.ShapeDtypeStruct(
                array.shape, array.dtype, sharding=parallel.sharding(spec)
            ),
            abstract_params(SMALL),
            param_specs(SMALL, "tp"),
        )
        x = jax.ShapeDtypeStruct((num_tokens, SMALL.hidden_size), jnp.bfloat16)
        plan = plan_layer(SMALL, num_tokens, tp=TP, tail=tail)
        layer = jax.jit(
            lambda params, x: moe_layer(params, x, config=SMALL, parallel=parallel, plan=plan)
        )
        layer.trace(params, x)

    own, other = 5 + steps.number, 6 - steps.number
    with pytest.raises(ValueError, match=f"has {own} tokens.*; process .* has {other} tokens"):
        trace(own, "tail_fusion")
    if steps.number == 0:
        limit, processes.TIMEOUT_SECONDS = processes.TIMEOUT_SECONDS, 1
        with pytest.raises(RuntimeError, match=r"process 1 did not come within 1 s.*same tier"):
            trace(7, "tail_fusion")
        processes.TIMEOUT_SECONDS = limit
    else:
        trace(7, "allreduce_overlap")
        time.sleep(2)  # process 0 has given up
    trace(8, "tail_fusion")


def another_number_of_tokens_is_named(steps: Steps) -> None:
    """Both programs are compiled by then, so nothing is traced."""
    steps.check(4)
    arrays = steps.draw(4)
    if steps.number == 1:
        arrays = (arrays[0][:, :3], arrays[1][:, :3], *arrays[2:])
    steps.fails(steps.tail, arrays, r"ranks disagree.*(4 tokens.*3 tokens|3 tokens.*4 tokens)")
    for _ in range(4):  # every slot
        steps.check()


def a_rank_that_stays_away_is_named(steps: Steps) -> None:
    def some(group, *arrays):
        def stay(latent, *rest):
            return latent.sum().astype(jnp.float32)

        def come(*arrays):
            return steps.call(group, *arrays).sum().astype(jnp.float32)

        return jax.lax.cond(group.index() == 3, stay, come, *arrays)

    step = jax.jit(steps.on_ranks(some))
    for _ in range(2):
        steps.fails(step, steps.draw(), "waits for rank 3")
        for _ in range(4):
            steps.check()


def a_process_that_is_killed_is_named(steps: Steps) -> None:
    if steps.number == 1:
        threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    arrays = steps.place(steps.draw(33))
    started = []

    def run():
        while True:
            started.append(time.monotonic())
            steps.tail(*arrays).block_until_ready()

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"process of rank [23] has ended; start"):
        run()
    assert time.monotonic() - started[-1] < 5
    assert len(started) > 3, "it died before its first steps"
    steps.fails(steps.tail, steps.draw(), r"process of rank [23] has ended")  # and no hang


def worker(address: str, number: int, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    steps = Steps(number)
    for tokens in (1, 9, 33, 3):
        steps.check(tokens)
    for part in (
        other_layers_are_named_while_tracing,
        another_number_of_tokens_is_named,
        a_rank_that_stays_away_is_named,
        a_process_that_is_killed_is_named,
    ):
        start = time.monotonic()
        part(steps)
        print(number, part.__name__, f"{time.monotonic() - start:.1f} s", flush=True)
    os._exit(0)  # the other process cannot come to a shutdown


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
