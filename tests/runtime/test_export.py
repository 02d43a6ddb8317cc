import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.export import export_function, load_function
from k3jax.runtime.ffi import call_program, platform_choice
from k3jax.runtime.target import Target
from tests.runtime.toy import chain_program

REPOSITORY = Path(__file__).parents[2]
COUNT = 1024
NUM_DEVICES = 4

COMPILE_EXPORTED = """
import sys
for name in ("cutlass", "cutlass.cute"):
    sys.modules[name] = None  # any import of the CuTe DSL fails
import jax, jax.numpy as jnp, json
from jax.sharding import NamedSharding, PartitionSpec as P
from k3jax.export import load_function
from tests.device_free import gpu_mesh
mesh = gpu_mesh("h200", 4)
function = load_function(open(sys.argv[1], "rb").read())
x = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
compiled = jax.jit(function).lower(x).compile()
print(json.dumps({
    "calls": compiled.as_text().count('custom_call_target="k3jax_launch"'),
    "modules": sorted(name for name in sys.modules if "toy" in name or name.startswith("cuda.")),
}))
"""


def chain(x):
    program = chain_program(x.size, 2.0, 3.0)
    return call_program(program, x, target=Target.named("h200"))[0]


apply = platform_choice(chain, lambda x: 3.0 * (2.0 * x) + 1.0)


def test_exported_program_compiles_in_a_process_without_the_dsl(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA plugin")
    mesh = jax.make_mesh(
        (NUM_DEVICES,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:NUM_DEVICES]
    )
    function = jax.shard_map(apply, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    x = jax.ShapeDtypeStruct(
        (NUM_DEVICES * COUNT,), jnp.float32, sharding=NamedSharding(mesh, P("tp"))
    )
    path = tmp_path / "program"
    path.write_bytes(export_function(function, x))
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_EXPORTED, str(path)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {"calls": 1, "modules": []}


def test_cpu_export_runs_the_reference():
    x = np.random.default_rng().standard_normal(COUNT).astype(np.float32)
    shape = jax.ShapeDtypeStruct((COUNT,), jnp.float32)
    data = export_function(apply, shape, platform="cpu")
    assert b"cubins" in export_function(apply, shape)
    assert b"cubins" not in data
    # Near x = -1/6 the sum cancels, so what counts is the rounding of its terms, below 32.
    np.testing.assert_allclose(jax.jit(load_function(data))(x), 6.0 * x + 1.0, atol=32 * 2**-23)


def test_foreign_bytes_are_refused():
    with pytest.raises(ValueError, match="these 5 bytes are not a function exported by k3jax"):
        load_function(b"bytes")
