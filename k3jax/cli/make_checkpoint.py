"""Write a synthetic checkpoint in the published format.

Random MoE layers, with the names, dtypes, shapes and files of Kimi K3. One layer of the published
shape takes 16 GB of disk.
"""

import argparse

from k3jax.cli.arguments import integers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("path", metavar="DIR", help="folder to write, new or empty")
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--tiny", action="store_true", help="a few megabytes, for tests and demos")
    shape.add_argument("--layer-shape", choices=("kimi_k3",), help="a published layer shape")
    parser.add_argument(
        "--layers",
        type=integers,
        help="which, as 1,2 (default: all of a tiny model, the first MoE layer of kimi_k3)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument("--shard-bytes", type=int, help="largest shard (default 2 MiB or 4 GiB)")


def run(args: argparse.Namespace) -> None:
    """Writes the checkpoint."""
    from k3jax.checkpoint import write_checkpoint
    from k3jax.config import MoEConfig

    if args.tiny:
        config, shard_bytes = MoEConfig.tiny(), 1 << 21
        layers = config.moe_layers
    else:
        config, shard_bytes = MoEConfig.kimi_k3(), 1 << 32
        layers = config.moe_layers[:1]
    layers = layers if args.layers is None else args.layers
    shard_bytes = shard_bytes if args.shard_bytes is None else args.shard_bytes
    write_checkpoint(args.path, config, layers, seed=args.seed, shard_bytes=shard_bytes)
    print(f"wrote {args.path}: layers {', '.join(map(str, layers))}")
