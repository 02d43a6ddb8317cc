"""The fused tail's protocol on CPU devices, through jit, shard_map and XLA, against NumPy."""

import ctypes
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.ops.tail import fused
from k3jax.parallel import RankGroup
from k3jax.runtime import ffi, library
from k3jax.runtime.program import ArraySpec
from k3jax.runtime.workspace import HEADER_WORDS, TailLayout
from tests.ops import tail_oracle
from tests.ops.tail_oracle import BF16, EPS, oracle
from tests.support import bits, parallel_of

LATENT, HIDDEN = 64, 128


def draw(rng, tp, tokens):
    return tail_oracle.draw(rng, tp, tokens, LATENT, HIDDEN)


def sharded(tp, function, in_specs):
    """Runs `function(group, *local)` on every rank; its result is stacked over ranks."""

    def local(*args):
        return function(RankGroup(tp, "tp"), *args)[None]

    mesh = parallel_of(tp).mesh
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P("tp")))


SPECS = (P("tp"), P("tp"), P(), P())


def tail_of(tp, **options):
    def function(group, latent, shared, gain, up):
        return fused.fused_tail_host(
            latent[0], shared[0], gain, up, eps=EPS, group=group, **options
        )

    return sharded(tp, function, SPECS)


def check(outputs, wanted):
    outputs = np.asarray(outputs)
    for rank in range(1, len(outputs)):
        np.testing.assert_array_equal(bits(outputs[rank]), bits(outputs[0]))
    got = outputs[0].astype(np.float64)
    # A float32 sum in another order can flip a rounding: one bfloat16 ulp of the larger addend.
    np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=2**-6)
    assert np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("tp", fused.RANKS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 128])
def test_matches_numpy_and_every_rank_has_the_same_bits(tp, tokens):
    arrays = draw(np.random.default_rng(), tp, tokens)
    check(tail_of(tp)(*arrays), oracle(*arrays))


@pytest.mark.parametrize("tp", [2, 16])
def test_one_shot_and_two_shots_have_the_same_bits(tp):
    arrays = draw(np.random.default_rng(), tp, 9)
    one, two = (np.asarray(tail_of(tp, two_shot=shots)(*arrays)) for shots in (False, True))
    np.testing.assert_array_equal(bits(one), bits(two))


def test_tokens_fewer_than_ranks_in_two_shots():
    arrays = draw(np.random.default_rng(), 8, 3)
    check(tail_of(8, two_shot=True)(*arrays), oracle(*arrays))


@pytest.mark.parametrize("two_shot", [False, True])
def test_scattered_output_is_the_rank_s_columns(two_shot):
    arrays = draw(np.random.default_rng(), 4, 6)
    whole = np.asarray(tail_of(4, two_shot=two_shot)(*arrays))[0]
    parts = np.asarray(tail_of(4, two_shot=two_shot, scattered=True)(*arrays))
    np.testing.assert_array_equal(bits(np.concatenate(parts, axis=1)), bits(whole))


def test_own_rows_of_the_weight_give_the_same_bits_as_all_rows():
    arrays = draw(np.random.default_rng(), 4, 6)

    def function(group, latent, shared, gain, up):
        return fused.fused_tail_host(latent[0], shared[0], gain, up, eps=EPS, group=group)

    own = sharded(4, function, (P("tp"), P("tp"), P(), P("tp")))(*arrays)
    np.testing.assert_array_equal(bits(own), bits(tail_of(4)(*arrays)))


@pytest.mark.parametrize("two_shot", [False, True])
def test_unfinalised_rows_are_weighed_and_dropped_ones_never_read(two_shot):
    tp, tokens, k = 4, 5, 16
    rng = np.random.default_rng()
    _, shared, gain, up = draw(rng, tp, tokens)
    rows = rng.standard_normal((tp, tokens, k, LATENT)).astype(BF16)
    weights = rng.random((tokens, k)).astype(np.float32)
    ids = rng.integers(0, 896, (tokens, k)).astype(np.int32)
    ids[rng.random((tokens, k)) < 0.3] = -1
    ids[2] = -1  # a token without experts
    rows[:, ids < 0] = np.nan
    # float64 products and sums, one rounding: within an ulp of 16 float32 fused multiply-adds
    kept = np.where(ids[None, :, :, None] < 0, 0, rows.astype(np.float64))
    latent = np.einsum("rtkl,tk->rtl", kept, weights).astype(BF16)

    def function(group, rows, shared, gain, up, weights, ids):
        return fused.fused_tail_host(
            rows[0], shared[0], gain, up, weights=weights, ids=ids,
            eps=EPS, group=group, two_shot=two_shot,
        )  # fmt: skip

    got = sharded(tp, function, (*SPECS, P(), P()))(rows, shared, gain, up, weights, ids)
    got = np.asarray(got)
    wanted = oracle(latent, shared, gain, up)
    assert np.isfinite(got.astype(np.float32)).all()
    np.testing.assert_array_equal(bits(got[1]), bits(got[0]))
    assert np.linalg.norm(got[0].astype(np.float64) - wanted) <= 3e-3 * np.linalg.norm(wanted)


def test_negative_zero_everywhere_hangs_nobody():
    tp, tokens = 4, 7
    latent, shared, gain, up = draw(np.random.default_rng(), tp, tokens)
    latent[:], shared[:] = -0.0, -0.0
    latent[1:, :, ::2], shared[2:, :, 1::2] = 0.0, 0.0
    for two_shot in (False, True):
        got = tail_of(tp, two_shot=two_shot)(latent, shared, gain, up)
        np.testing.assert_array_equal(bits(got), 0)


def test_nan_payloads_cross_and_stay_in_their_token():
    tp, tokens = 4, 5
    rng = np.random.default_rng()
    latent, shared, gain, up = draw(rng, tp, tokens)
    clean = np.asarray(tail_of(tp)(latent, shared, gain, up))
    payloads = (rng.integers(1, 128, 8) | rng.choice([0x7F80, 0xFF80], 8)).astype(np.uint16)
    latent[2, 3, 10:18] = payloads.view(BF16)
    shared[1, 1, 20:28] = payloads.view(BF16)
    got = np.asarray(tail_of(tp)(latent, shared, gain, up))
    nan = np.isnan(got.astype(np.float32))
    assert nan[:, 3].all()
    assert nan[:, 1, 20:28].all()
    nan[:, 3], nan[:, 1, 20:28] = False, False
    assert not nan.any()
    np.testing.assert_array_equal(bits(got[:, (0, 2, 4)]), bits(clean[:, (0, 2, 4)]))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_scan_over_layers(layers):
    tp, tokens = 8, 4
    rng = np.random.default_rng()
    draws = [draw(rng, tp, tokens) for _ in range(layers)]
    stacked = [np.stack([arrays[i] for arrays in draws]) for i in range(4)]

    def function(group, latent, shared, gain, up):
        def layer(_, arrays):
            latent, shared, gain, up = arrays
            y = fused.fused_tail_host(latent[0], shared[0], gain, up, eps=EPS, group=group)
            return None, y

        return jax.lax.scan(layer, None, (latent, shared, gain, up))[1]

    run = sharded(tp, function, (P(None, "tp"), P(None, "tp"), P(), P()))
    for _ in range(2):
        outputs = np.asarray(run(*stacked))
        for layer, arrays in enumerate(draws):
            check(outputs[:, layer], oracle(*arrays))


def test_changing_tokens_and_shots_between_calls():
    tp = 4
    rng = np.random.default_rng()
    calls = {t: tail_of(tp) for t in (128, 64, 17, 5, 1)}
    for tokens in (128, 1, 64, 1, 1, 1, 17, 128, 5, 5, 1, 64):  # large then small, and back
        arrays = draw(rng, tp, tokens)
        check(calls[tokens](*arrays), oracle(*arrays))


def test_groups_beside_each_other_do_not_mix():
    mesh = jax.make_mesh(
        (2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:8],
    )  # fmt: skip
    rng = np.random.default_rng()
    draws = [draw(rng, 4, 3) for _ in range(2)]
    latent, shared = (np.stack([arrays[i] for arrays in draws]) for i in range(2))

    def local(latent, shared, gain, up):
        number = jax.lax.axis_index("dp")
        y = fused.fused_tail_host(
            latent[0, 0], shared[0, 0], gain[0], up[0], eps=EPS, group=RankGroup(4, "tp"),
            number=number,
        )  # fmt: skip
        return y[None, None]

    specs = (P("dp", "tp"), P("dp", "tp"), P("dp"), P("dp"))
    gain, up = (np.stack([arrays[i] for arrays in draws]) for i in (2, 3))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp")))
    outputs = np.asarray(run(latent, shared, gain, up))
    for number, arrays in enumerate(draws):
        check(outputs[number], oracle(*arrays))


def diverging(tp, odd, even, **options):
    """Rank 1 makes the call `odd(...)`, the others `even(...)`; both return a scalar."""

    def function(group, latent, shared, gain, up):
        tail = functools.partial(fused.fused_tail_host, eps=EPS, group=group, **options)
        args = (latent[0], shared[0], gain, up)
        branches = (lambda: even(tail, *args), lambda: odd(tail, *args))
        return jax.lax.cond(group.index() == 1, branches[1], branches[0])[None]

    return sharded(tp, function, SPECS)


def total(y):
    return y.astype(jnp.float32).sum()


def test_one_rank_with_another_number_of_tokens_is_named_and_the_next_step_is_right():
    tp = 4
    arrays = draw(np.random.default_rng(), tp, 6)
    run = diverging(
        tp,
        odd=lambda tail, latent, shared, *rest: total(tail(latent[:5], shared[:5], *rest)),
        even=lambda tail, *args: total(tail(*args)),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"ranks disagree.*5 tokens|6 tokens"):
        run(*arrays).block_until_ready()
    for _ in range(4):  # every slot
        check(tail_of(tp)(*arrays), oracle(*arrays))


def test_a_rank_that_stays_away_is_named_and_the_next_step_is_right():
    tp = 4
    arrays = draw(np.random.default_rng(), tp, 6)
    run = diverging(
        tp,
        odd=lambda tail, latent, *rest: total(latent),
        even=lambda tail, *args: total(tail(*args)),
        budget_ms=300,
    )
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            run(*arrays).block_until_ready()
        assert "DEADLINE_EXCEEDED" in str(error.value)
        assert "waits for rank 1" in str(error.value)
        check(tail_of(tp)(*arrays), oracle(*arrays))


@pytest.mark.parametrize("scalar", [1, 2, 3, 4])
def test_operands_without_dimensions_are_refused(scalar):
    shapes = [(4, LATENT), (4, HIDDEN), (LATENT,), (HIDDEN, LATENT)]
    shapes[scalar - 1] = ()
    attributes = {
        **{name: np.int64(1) for name in ("max_tokens", "budget_ms")},
        **{name: np.bool_(False) for name in ("two_shot", "scattered")},
        **{"ranks": np.int64(2), "eps": np.float32(EPS), "members": np.zeros(0, np.int64)},
    }
    operands = [jnp.zeros(2, jnp.int32), *(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)]
    result = ArraySpec((4, HIDDEN), np.dtype(jnp.bfloat16))
    with pytest.raises(jax.errors.JaxRuntimeError, match="k3jax_tail: shapes do not fit"):
        ffi.call_host("k3jax_tail", result, *operands, **attributes).block_until_ready()


def test_two_programs_interleaved_on_one_workspace_are_refused():
    """Two ranks make a call each in another execution: neither may take the other's words."""
    tp = 2
    arrays = [np.asarray(a) for a in draw(np.random.default_rng(), tp, 3)]
    errors = []

    def half(rank):
        latent, shared, gain, up = arrays
        device = jax.devices()[rank]

        @jax.jit
        def alone(latent, shared, gain, up):
            class Posing(RankGroup):
                def index(self):
                    return rank

            return fused.fused_tail_host(
                latent, shared, gain, up, eps=EPS, group=Posing(tp), budget_ms=5000
            )

        local = [jax.device_put(a, device) for a in (latent[rank], shared[rank], gain, up)]
        try:
            alone(*local).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=half, args=(rank,)) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == tp
    assert all("one program at a time" in error or "One workspace" in error for error in errors)
    check(tail_of(tp)(*arrays), oracle(*arrays))


def test_layout_is_the_same_in_python_and_in_the_library():
    for ranks, max_tokens, latent, hidden in ((2, 128, 3584, 7168), (16, 5, 64, 128)):
        words = (ctypes.c_int64 * 6)()
        facts = [ctypes.c_int64(n) for n in (ranks, max_tokens, latent, hidden)]
        library.load_library().k3jax_tail_layout(*facts, words)
        layout = TailLayout(ranks, max_tokens, latent, hidden)
        parts = (layout.latent, layout.shared, layout.normed, layout.output, layout.num_bytes)
        assert list(words) == [HEADER_WORDS, *(part // 4 for part in parts)]
