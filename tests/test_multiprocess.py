"""Two processes of four devices each give the layer that one process of eight gives.

Run as a module, this file is one of the two processes.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.layer import moe_layer
from k3jax.parallel import Parallel
from k3jax.params import init_params, param_specs
from k3jax.plan import plan_layer
from tests.support import SMALL, bits, tokens_of
from tests.workers import Workers

PROCESSES, DEVICES, TP = 2, 4, 8
TIMEOUT = 120
CASES = {
    "allreduce_overlap": "replicated",
    "column_parallel": "replicated",
    "unfused": "scattered",
    "tail_fusion": "replicated",
}


def outputs() -> dict[str, np.ndarray]:
    """For each tail, the results of the ranks that this process holds."""
    mesh = jax.make_mesh((TP,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:TP])
    parallel = Parallel(mesh)

    def place(array, spec):
        host = np.asarray(array)
        return jax.make_array_from_callback(
            host.shape, parallel.sharding(spec), lambda index: host[index]
        )

    params = jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(0))
    params = jax.tree.map(place, params, param_specs(SMALL, parallel.axis))
    x = place(tokens_of(9, SMALL.hidden_size), P())

    @jax.jit
    def layers(params, x):
        def layer(tail, output):
            plan = plan_layer(SMALL, len(x), tp=TP, output=output, tail=tail)
            return moe_layer(
                params, x, config=SMALL, parallel=parallel, plan=plan, output=output
            ).astype(np.float32)

        return {tail: layer(tail, output) for tail, output in CASES.items()}

    return {
        tail: np.stack([np.asarray(shard.data) for shard in y.addressable_shards])
        for tail, y in layers(params, x).items()
    }


def test_two_processes_equal_one(tmp_path):
    workers = Workers(__name__, PROCESSES, tmp_path)
    want = outputs()
    ended = workers.wait(TIMEOUT)
    assert [process.code for process in ended] == [0, 0], "\n".join(p.log for p in ended)

    parts = [np.load(tmp_path / f"{number}.npz") for number in range(PROCESSES)]
    for tail, output in CASES.items():
        got = np.concatenate([part[tail] for part in parts])
        assert len(got) == TP
        assert np.all(np.isfinite(got))
        # Partials are bfloat16 and summed in float32: exact in any order, but for rare ones.
        np.testing.assert_array_equal(bits(got), bits(want[tail]), tail)
        if output == "replicated":
            np.testing.assert_array_equal(bits(got), bits(got[[0] * TP]), tail)


def worker(address: str, number: int, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, number, initialization_timeout=60)
    np.savez(folder / f"{number}.npz", **outputs())
    jax.distributed.shutdown()


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
