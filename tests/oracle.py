"""The layer in NumPy float64, written from its formulas alone.

Nothing here imports k3jax or jax: it is what every implementation is held against. Rounding to
bfloat16 happens only where `rounded=True` asks for the points that the W4A16 layer rounds at.
"""

import ml_dtypes
import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = np.concatenate([E2M1, -E2M1])
GROUP = 32


def bf16(x):
    """Rounds to bfloat16 and back; NaN and infinities pass."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def mxfp4_values(packed, scale):
    """packed [..., K/2], scale [..., K/32] -> float64 [..., K]; low nibble is the even element."""
    packed, scale = np.asarray(packed), np.asarray(scale).astype(np.int64)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    factor = np.where(scale == 255, np.nan, np.ldexp(1.0, np.minimum(scale, 254) - 127))
    return E2M1[codes] * np.repeat(factor, GROUP, -1)


def situ(gate, up, beta=4.0, linear_beta=25.0):
    with np.errstate(over="ignore"):
        capped = beta * np.tanh(gate / beta) / (1.0 + np.exp(-gate))
    return capped * (up if linear_beta is None else linear_beta * np.tanh(up / linear_beta))


def route(logits, bias, top_k, renormalize=True, factor=1.0):
    """logits [T, E] -> ids [T, K], weights [T, K]; one token at a time, by a plain stable sort."""
    logits, bias = np.asarray(logits, np.float64), np.asarray(bias, np.float64)
    ids = np.zeros((len(logits), top_k), np.int32)
    weights = np.zeros((len(logits), top_k))
    for t, row in enumerate(logits):
        valid = np.isfinite(row)
        score = np.where(valid, 1.0 / (1.0 + np.exp(-np.where(valid, row, 0.0))), 0.0)
        choice = np.where(valid, score + bias, -np.inf)
        ids[t] = np.argsort(-choice, kind="stable")[:top_k]
        w = score[ids[t]]
        if not valid.any():
            weights[t] = 1.0 / top_k if renormalize else 0.0
            continue
        weights[t] = (w / (w.sum() + 1e-20) if renormalize else w) * factor
    return ids, weights


def mxfp8(x):
    """Rounds to MXFP8 and back: groups of 32, power-of-two scale with max / 448 rounded up."""
    groups = np.asarray(x, np.float64).reshape(*np.shape(x)[:-1], -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    exponent = np.ceil(np.log2(np.where(largest > 0, largest / 448, 1.0)))
    scale = np.ldexp(1.0, exponent.astype(int))
    e4m3 = (groups / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (e4m3.astype(np.float64) * scale).reshape(np.shape(x))


def expert_row_w4a8(z, w1, w3, w2, beta, linear_beta):
    """Like `expert_row`, rounding activations to MXFP8 in front of both products."""
    z = mxfp8(z)
    return bf16(w2 @ mxfp8(situ(w1 @ z, w3 @ z, beta, linear_beta)))


def expert_row(z, w1, w3, w2, beta, linear_beta, rounded):
    """One token through one expert: z [L] -> [L]; weights already float64."""
    r = bf16 if rounded else lambda x: x
    with np.errstate(invalid="ignore"):
        hidden = r(situ(r(w1 @ z), r(w3 @ z), beta, linear_beta))
        return r(w2 @ hidden)


def experts(z, ids, weights, bank, beta=4.0, linear_beta=25.0, rounded=True):
    """Weighted sum over the slots; `bank(e)` gives (w1, w3, w2) of expert e as float64."""
    out = np.zeros(z.shape)
    for t in range(len(z)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            if expert >= 0:
                row = expert_row(z[t], *bank(int(expert)), beta, linear_beta, rounded)
                out[t] += weight * row
    return bf16(out) if rounded else out


def shared_expert(x, gate_proj, up_proj, down_proj, beta=4.0, linear_beta=25.0, rounded=True):
    r = bf16 if rounded else lambda v: v
    return r(r(situ(r(x @ gate_proj.T), r(x @ up_proj.T), beta, linear_beta)) @ down_proj.T)


def rms_norm(m, gain, eps):
    return m / np.sqrt((m * m).mean(-1, keepdims=True) + eps) * gain


def tail(m, shared, gain, up_proj, eps, rounded=True):
    """m [T, L] and shared [T, H], both already summed over ranks -> y [T, H]."""
    r = bf16 if rounded else lambda v: v
    normed = m if gain is None else r(rms_norm(m, gain, eps))
    out = r(normed @ up_proj.T)
    return out if shared is None else r(out + shared)


def layer(params, x, config, ids=None, weights=None, rounded=True, **options):
    """The whole layer on unsharded NumPy parameters.

    Args:
        params: dict with the checkpoint's tensor names, experts stacked on the first axis.
        x: [T, hidden].
        config: any object with the fields of the model's config.
        ids: expert choice to use instead of routing here (a near-tie may flip between precisions).
        weights: weights that belong to `ids`.
        rounded: whether to round to bfloat16 where the W4A16 layer does.
        options: `routed_input` [T, latent], already down-projected.
    """
    r = bf16 if rounded else lambda v: v
    f64 = {
        name: np.asarray(value, np.float64)
        for name, value in params.items()
        if "experts.w" not in name
    }
    x = np.asarray(x, np.float64)
    if ids is None:
        ids, weights = route(
            x @ f64["gate.weight"].T,
            f64["gate.e_score_correction_bias"],
            config.experts_per_token,
            config.renormalize,
            config.routed_scaling_factor,
        )
    z = options.get("routed_input")
    z = r(x @ f64["routed_expert_down_proj.weight"].T) if z is None else np.asarray(z, np.float64)

    def bank(e):
        return [
            mxfp4_values(
                params[f"experts.{w}.weight_packed"][e], params[f"experts.{w}.weight_scale"][e]
            )
            for w in ("w1", "w3", "w2")
        ]

    betas = (config.situ_beta, config.situ_linear_beta)
    m = experts(z, ids, weights, bank, *betas, rounded=rounded)
    shared = None
    if config.num_shared_experts:
        mats = [f64[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")]
        shared = shared_expert(x, *mats, *betas, rounded=rounded)
    gain = f64["routed_expert_norm.weight"] if config.latent_norm else None
    return tail(m, shared, gain, f64["routed_expert_up_proj.weight"], config.rms_norm_eps, rounded)


def relative_error(got, want):
    """||got - want|| / ||want|| in float64; NaN in `got` never passes."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = np.linalg.norm(want)
    return np.linalg.norm(got - want) / scale if scale else np.linalg.norm(got)
