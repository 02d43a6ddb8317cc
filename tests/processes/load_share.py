"""One of two processes that share a mesh of eight: loads layer 1 and checks what it read.

    python -m tests.processes.load_share PROCESS PORT FOLDER

Prints the bytes read, then how a mesh without a device of this process is refused.
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from jax.sharding import Mesh

from k3jax.checkpoint import load_layer
from k3jax.parallel import Parallel
from tests.checkpoints import (
    CONFIG,
    PREFIX,
    SHARDED_AXIS,
    Meter,
    check,
    layer_of,
    read_checkpoint,
    times_read,
)

process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, process)

parallel = Parallel(Mesh(np.array(jax.devices()), ("tp",)))
assert not parallel.one_process
with Meter(folder) as meter:
    params = load_layer(meter, 1, CONFIG, parallel)
check(params, layer_of(read_checkpoint(folder), 1), parallel)
for name, count in meter.counts.items():
    short = name.removeprefix(PREFIX.format(1))
    want = np.full(count.shape, times_read(short))
    axis = next((a for part, a in SHARDED_AXIS.items() if part in short), None)
    if axis is not None:
        other = np.array_split(np.arange(count.shape[axis]), 2)[1 - process]
        want[(slice(None),) * axis + (other,)] = 0
    assert (count == want).all(), short
print(meter.bytes_read)

others = [device for device in jax.devices() if device.process_index != process]
try:
    load_layer(folder, 1, CONFIG, Parallel(Mesh(np.array(others), ("tp",))))
except ValueError as error:
    print(error, flush=True)
# Leaving at once, without the barrier at exit: no process waited for the other before either.
os._exit(0)
