"""Prefill and decode through a stack of MoE layers, timed step by step.

    python -m models.kimi_k3.generate --tp 8 --tokens 64 --layers 2

There is no attention and no vocabulary: a prompt is rows of embeddings, and what a decode step
feeds to the next one is its own output, normalised. See README.md beside this file.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax import MoEConfig, Parallel, plan_layer
from models.kimi_k3.load import load_layers
from models.kimi_k3.model import init_layers, rms_norm, run_layers


def generate(
    step: Callable[[jax.Array], jax.Array], prompt: jax.Array, num_steps: int, eps: float
) -> tuple[jax.Array, list[float]]:
    """Runs the prompt, then `num_steps` steps of one token for each sequence.

    Args:
        step: x [..., H] -> y [..., H], compiled.
        prompt: bfloat16 [B, P, H].
        num_steps: decode steps.
        eps: of the norm between steps.

    Returns:
        The outputs [B, 1 + num_steps, H], that of the prompt's last position first, and the seconds
        that each of the 1 + num_steps calls took.
    """
    outputs, seconds, x = [], [], prompt
    gain = jnp.ones(prompt.shape[-1], prompt.dtype)
    for _ in range(1 + num_steps):
        start = time.perf_counter()
        y = jax.block_until_ready(step(x))
        seconds.append(time.perf_counter() - start)
        outputs.append(y[:, -1])
        x = rms_norm(y[:, -1:], gain, eps)
    return jnp.stack(outputs, axis=1), seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if every output is finite."""
    options = _parse(arguments)
    try:
        return _run(options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"generate: {error}") from error


def _run(options: argparse.Namespace) -> int:
    config = _config(options)
    layers = _layers(options.layers, config)
    parallel = Parallel.over_devices(options.tp)
    prompt = _prompt(options, config)
    print(f"layers {layers[0]}-{layers[-1]}, {options.tp} x {jax.devices()[0].device_kind}")
    for name, tokens in (("prefill", prompt.shape[0] * prompt.shape[1]), ("decode", len(prompt))):
        print(f"{name}: {plan_layer(config, tokens, tp=options.tp)}")

    if options.checkpoint:
        params = load_layers(options.checkpoint, layers, config, parallel)
    else:
        params = init_layers(config, layers, jax.random.key(0), parallel)
    jitted = jax.jit(functools.partial(run_layers, config=config, parallel=parallel))
    step = functools.partial(jitted, params)
    start = time.perf_counter()
    generate(step, prompt, min(options.steps, 1), config.rms_norm_eps)
    print(f"compiled and run once in {time.perf_counter() - start:.1f} s")
    outputs, seconds = generate(step, prompt, options.steps, config.rms_norm_eps)
    return _report(options, prompt, outputs, seconds)


def _report(
    options: argparse.Namespace, prompt: jax.Array, outputs: jax.Array, seconds: list[float]
) -> int:
    print(f"prefill of {prompt.shape[0]} x {prompt.shape[1]} tokens: {1e3 * seconds[0]:.2f} ms")
    for number, elapsed in enumerate(seconds[1:], start=1):
        print(f"decode step {number} of {len(prompt)} tokens: {1e3 * elapsed:.2f} ms")
    if options.output:
        np.save(options.output, np.asarray(outputs, np.float32))
    finite = bool(jnp.all(jnp.isfinite(outputs)))
    print("all outputs are finite" if finite else "FAILED: an output is not finite")
    return 0 if finite else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=_positive, default=1, help="devices that split the weights")
    parser.add_argument("--batch", type=_positive, default=1, help="sequences")
    parser.add_argument("--tokens", type=_positive, default=64, help="tokens of a random prompt")
    parser.add_argument("--prompt", help=".npy file with embeddings [B, P, H] in place of that")
    parser.add_argument("--steps", type=_count, default=4, help="decode steps")
    parser.add_argument("--layers", type=_positive, default=2, help="MoE layers, from the first")
    parser.add_argument("--checkpoint", help="folder of a checkpoint; random weights without it")
    parser.add_argument(
        "--shape", choices=("tiny", "kimi_k3"), default="tiny", help="shape of random weights"
    )
    parser.add_argument("--output", help=".npy file for the outputs, float32 [B, 1 + steps, H]")
    return parser.parse_args(arguments)


def _count(text: str, low: int = 0) -> int:
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"{value} must be at least {low}")
    return value


_positive = functools.partial(_count, low=1)


def _config(options: argparse.Namespace) -> MoEConfig:
    if options.checkpoint:
        return MoEConfig.from_hf(options.checkpoint)
    return getattr(MoEConfig, options.shape)()


def _layers(count: int, config: MoEConfig) -> list[int]:
    if count > len(config.moe_layers):
        raise ValueError(f"--layers {count} is more than the {len(config.moe_layers)} MoE layers")
    return list(config.moe_layers[:count])


def _prompt(options: argparse.Namespace, config: MoEConfig) -> jax.Array:
    if not options.prompt:
        shape = (options.batch, options.tokens, config.hidden_size)
        return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    prompt = np.load(options.prompt)
    if prompt.ndim != 3 or prompt.shape[-1] != config.hidden_size or not prompt.size:
        raise ValueError(
            f"--prompt {options.prompt} has shape {prompt.shape}; want [B, P, {config.hidden_size}]"
        )
    return jnp.asarray(prompt, jnp.bfloat16)


if __name__ == "__main__":
    raise SystemExit(main())
