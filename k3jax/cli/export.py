"""Serialise one layer's step, with its kernels, for a machine that has only jax and k3jax.

Load it there with `k3jax.load_function(bytes)` and call it with parameters and tokens.
"""

import argparse
import functools
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("output", metavar="FILE", help="file to write")
    parser.add_argument("--tokens", type=int, required=True, help="batch size")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--target", required=True, help="device kind, such as h200")
    parser.add_argument("--config", help="config.json or its folder (default: Kimi K3)")
    parser.add_argument("--force", action="store_true", help="write over an existing file")


def run(args: argparse.Namespace) -> None:
    """Lowers the layer for CUDA and writes it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from k3jax.cli.plan import render
    from k3jax.config import MoEConfig
    from k3jax.export import export_function
    from k3jax.layer import moe_layer
    from k3jax.parallel import Parallel
    from k3jax.params import map_infos
    from k3jax.plan import plan_layer

    output = Path(args.output)
    if output.exists() and not args.force:
        raise FileExistsError(f"{output} exists; pass --force to write over it")
    config = MoEConfig.from_hf(args.config) if args.config else MoEConfig.kimi_k3()
    plan = plan_layer(config, args.tokens, tp=args.tp, target=args.target)
    parallel = Parallel.over_devices(args.tp)

    def shape(dims, dtype, spec):
        sharding = parallel.sharding(spec) if parallel else None
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    axis = parallel.axis if parallel else ""
    params = map_infos(lambda info: shape(info.shape, info.dtype, info.spec(axis)), config)
    x = shape((args.tokens, config.hidden_size), jnp.bfloat16, P())
    layer = functools.partial(moe_layer, config=config, parallel=parallel, plan=plan)
    data = export_function(layer, params, x)
    output.write_bytes(data)
    print(render([plan]))
    print(f"wrote {output}: {len(data)} bytes")
