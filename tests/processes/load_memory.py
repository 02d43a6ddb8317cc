"""Loads a layer with stacks of 96 MiB over eight devices and prints, in bytes:

held    the layer's arrays
kept    resident memory that came with the load and stayed
extra   the peak over what stayed

python -m tests.processes.load_memory FOLDER
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

from k3jax.checkpoint import load_layer, write_checkpoint
from k3jax.config import MoEConfig
from k3jax.parallel import Parallel


def memory():
    """Resident bytes now, and their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")]


folder = sys.argv[1]
config = MoEConfig(
    hidden_size=256,
    latent_size=2048,
    num_experts=96,
    experts_per_token=2,
    expert_intermediate_size=1024,
    num_shared_experts=1,
)
write_checkpoint(folder, config, progress=False)
parallel = Parallel(jax.make_mesh((8,), ("tp",)))
jax.block_until_ready(jax.device_put(0, parallel.sharding(jax.P())))
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
before, _ = memory()
params = load_layer(folder, 0, config, parallel)
after, peak = memory()
print(sum(array.nbytes for array in jax.tree.leaves(params)), after - before, peak - after)
