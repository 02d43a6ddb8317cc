"""Run one layer of a checkpoint on a file of tokens.

The input is a .npy file [T, hidden] of any float dtype, rounded to bfloat16; the output is float32
[T, hidden] that holds bfloat16 values, since .npy has no code for bfloat16. On CPU the layer runs
on as many virtual devices as --tp asks for.
"""

import argparse
import functools
from pathlib import Path

import numpy as np


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, or a single shard")
    parser.add_argument("--layer", type=int, required=True, help="decoder layer")
    parser.add_argument("--input", required=True, metavar="X.npy", help="tokens [T, hidden]")
    parser.add_argument("--output", required=True, metavar="Y.npy", help="result, float32")
    parser.add_argument("--force", action="store_true", help="write over an existing output")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--experts", help="force this tier of the routed experts")
    parser.add_argument("--tail", help="force this tier of the latent tail")
    parser.add_argument("--config", help="config.json (default: the one beside the shards)")
    parser.add_argument(
        "--allow-nan-scales", action="store_true", help="accept experts with scale byte 255"
    )


def run(args: argparse.Namespace) -> None:
    """Loads the layer, runs it once, and writes the result."""
    import jax

    from k3jax.checkpoint import load_layer
    from k3jax.cli.plan import render
    from k3jax.config import MoEConfig
    from k3jax.layer import moe_layer
    from k3jax.ops.experts.api import prepare_params, reads_kernel_order
    from k3jax.parallel import Parallel
    from k3jax.plan import plan_layer

    output = Path(args.output)
    _check_output(output, args.force)
    checkpoint = Path(args.checkpoint)
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    config = MoEConfig.from_hf(args.config or folder)
    x = _read_tokens(args.input, config.hidden_size)
    config.check_tp(args.tp)
    parallel = Parallel.over_devices(args.tp)
    plan = plan_layer(
        config,
        len(x),
        tp=args.tp,
        packed=reads_kernel_order(config, args.tp),
        experts=args.experts,
        tail=args.tail,
    )
    print(render([plan]))

    params = load_layer(
        checkpoint, args.layer, config, parallel, allow_nan_scales=args.allow_nan_scales
    )
    params = prepare_params(params, config, parallel)
    layer = functools.partial(moe_layer, config=config, parallel=parallel, plan=plan)
    y = np.asarray(jax.jit(layer)(params, x), np.float32)
    with output.open("wb") as stream:  # given a name, numpy would add .npy to it
        np.save(stream, y)
    print(f"wrote {output}: float32 {list(y.shape)}")


def _check_output(output: Path, force: bool) -> None:
    if output.exists() and not force:
        raise FileExistsError(f"--output {output} exists; pass --force to write over it")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: its folder is not there; make it first")


def _read_tokens(file: str, hidden_size: int) -> np.ndarray:
    """The tokens as bfloat16."""
    import jax.numpy as jnp

    try:
        with open(file, "rb") as stream:
            x = np.lib.format.read_array(stream, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"--input {file} is not a .npy file of numbers: {error}") from error
    if x.dtype.kind != "f":
        raise ValueError(f"--input {file} holds {x.dtype}; want floats (save bfloat16 as float32)")
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ValueError(f"--input {file} has shape {list(x.shape)}; want [T, {hidden_size}]")
    return x.astype(jnp.bfloat16)
