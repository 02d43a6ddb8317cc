"""Write a small checkpoint, load it over several ranks, decode and prefill, and check the numbers.

Runs anywhere: without a GPU the CPU stands for as many virtual devices as --tp asks for.
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path

_TOKENS = {"decode": (1, 8, 64), "prefill": (256, 512)}
_LIMIT = 6e-3
"""Relative L2 error allowed against float32; bfloat16 roundings alone give 3e-3 to 5e-3."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size (default 8)")
    parser.add_argument("--keep", metavar="DIR", help="write the checkpoint here and leave it")


def run(args: argparse.Namespace) -> None:
    """Runs the demo; raises if a number is off."""
    from k3jax.checkpoint import load_layer, write_checkpoint
    from k3jax.cli.plan import render
    from k3jax.config import MoEConfig
    from k3jax.parallel import Parallel
    from k3jax.plan import plan_layer

    config = MoEConfig.tiny()
    config.check_tp(args.tp)
    parallel = Parallel.over_devices(args.tp)
    layer = config.moe_layers[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or Path(scratch) / "checkpoint")
        write_checkpoint(folder, config, progress=False)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"1. wrote {folder}: {len(config.moe_layers)} layers, {size / 1e6:.1f} MB")
        params = load_layer(folder, layer, config, parallel, progress=False)
    expert_rows = params.experts.w1.packed
    shard = expert_rows.addressable_shards[0].data.shape
    print(f"2. loaded layer {layer} over {args.tp} ranks: w1 {expert_rows.shape}, a rank {shard}")

    counts = [n for group in _TOKENS.values() for n in group]
    print("3. " + render([plan_layer(config, n, tp=args.tp) for n in counts]))
    print("4. one jitted step for each batch, against the layer in float32:")
    worst = max(
        _step(kind, num_tokens, params, config, parallel)
        for kind, group in _TOKENS.items()
        for num_tokens in group
    )
    if not worst < _LIMIT:
        raise ValueError(f"relative error {worst:.1e} is past {_LIMIT:.0e}: the numbers are wrong")
    print(f"OK: every batch is within {_LIMIT:.0e} of float32, and all ranks hold the same bits")


def _step(kind: str, num_tokens: int, params, config, parallel) -> float:
    """Runs one batch, prints its line, and returns its error."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from k3jax.float32 import COMPILER_OPTIONS, float32_layer, relative_error
    from k3jax.layer import moe_layer

    x = jax.random.normal(jax.random.key(num_tokens), (num_tokens, config.hidden_size))
    x = x.astype(jnp.bfloat16)
    step = jax.jit(functools.partial(moe_layer, config=config, parallel=parallel))
    y = jax.block_until_ready(step(params, x))
    start = time.perf_counter()
    y = jax.block_until_ready(step(params, x))
    elapsed = time.perf_counter() - start
    copies = [np.asarray(shard.data).view(np.uint16) for shard in y.addressable_shards]
    if any((copy != copies[0]).any() for copy in copies):
        raise ValueError(f"{kind} of {num_tokens} tokens: ranks hold different bits")
    whole = jax.device_put(params, jax.devices()[0])
    yardstick = jax.jit(float32_layer, static_argnums=2, compiler_options=COMPILER_OPTIONS)
    want = yardstick(whole, x, config)
    error = relative_error(jax.device_put(y, jax.devices()[0]), want)
    print(f"   {kind:8} {num_tokens:4} tokens  {1e3 * elapsed:7.2f} ms  error {error:.1e}")
    return error
