"""The tail over ranks in NumPy, rounded where docs/protocol.md says, and inputs for it."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
EPS = 1e-5


def rounded(x):
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def sum_over_ranks(partials):
    total = np.zeros(partials.shape[1:], np.float32)
    for partial in partials:  # rank order: float32 addition is not associative
        total = (total + partial.astype(np.float32)).astype(np.float32)
    return rounded(total)


def oracle(latent, shared, gain, up):
    """latent [R, T, L], shared [R, T, H], gain [L], up [H, L]: float32 [T, H]."""
    m = sum_over_ranks(latent).astype(np.float64)
    scale = 1 / np.sqrt(np.mean(m * m, axis=1, keepdims=True) + EPS)
    normed = rounded(m * scale * gain.astype(np.float64)).astype(np.float64)
    routed = rounded(normed @ up.astype(np.float64).T)
    return rounded(routed + sum_over_ranks(shared))


def draw(rng, ranks, tokens, latent, hidden):
    """Random operands of all ranks, in the oracle's order."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(BF16)

    up = (rng.standard_normal((hidden, latent)) / np.sqrt(latent)).astype(BF16)
    return normal(ranks, tokens, latent), normal(ranks, tokens, hidden), normal(latent), up
