"""The fused tail's kernel in the PTX emulator: all ranks as block groups of one launch."""

import numpy as np
import pytest

from k3jax.ops.tail import fused
from k3jax.ops.tail.geometry import TailGeometry, kernel_facts
from k3jax.ops.tail.kernel_multicast import REPRESENTATIVES as MULTICASTS
from k3jax.ops.tail.kernel_tail import REPRESENTATIVES, TailKernel
from k3jax.runtime import sass
from k3jax.runtime.compile import ARCHS, compile_kernel
from k3jax.runtime.workspace import (
    AWAITED_WORD,
    EPOCH_WORD,
    FAILED_WORD,
    HEADER_WORDS,
    PREVIOUS_WORD,
)
from tests.emulator import UnknownInstructionError
from tests.emulator.device import Device
from tests.emulator.memory import GlobalMemory
from tests.emulator.program import launch_spec, load
from tests.ops.tail_oracle import BF16, EPS, draw, oracle
from tests.support import bits

MAX_TOKENS = 34
BUDGET = 2000


class Loopback:
    """The workspaces of all ranks on one device, and calls over them."""

    def __init__(
        self,
        ranks,
        latent_size,
        hidden_size,
        k_blocks,
        groups,
        k_parts,
        warps,
        round_tokens=4,
        streams=False,
        seed=None,
    ):
        self.facts = {
            "ranks": ranks, "latent_size": latent_size, "hidden_size": hidden_size,
            "max_tokens": MAX_TOKENS, "groups": groups, "k_blocks": k_blocks, "k_parts": k_parts,
            "warps": warps,
            "round_tokens": round_tokens,
        }  # fmt: skip
        self.ranks, self.streams, self.seed = ranks, streams, seed
        self.layout = TailKernel(**self.facts, two_shot=False).layout
        self.memory = GlobalMemory()
        stride = self.layout.num_bytes
        self.address = self.memory.allocate("workspaces", np.zeros(ranks * stride, np.uint8))
        peers = [self.address + rank * stride for rank in range(ranks)]
        for rank in range(ranks):
            self.words(rank)[:] = self.layout.armed(rank, peers)

    def words(self, rank) -> np.ndarray:
        start = self.address - self.memory.BASE + rank * self.layout.num_bytes
        return self.memory.data[start : start + self.layout.num_bytes].view(np.uint32)

    def draw(self, rng, tokens):
        facts = self.facts
        return draw(rng, self.ranks, tokens, facts["latent_size"], facts["hidden_size"])

    def call(self, arrays, two_shot, ranks=None, **options):
        """Runs one call on the first `ranks` ranks and returns their results."""
        spec, collect = self.prepare(arrays, two_shot, ranks, **options)
        Device(self.memory, seed=self.seed, patience=20 * BUDGET).run([spec])
        return collect()

    def chain(self, calls):
        """Runs calls in one stream, each launched before the previous one has ended."""
        prepared = [
            self.prepare(arrays, two_shot, number=number)
            for number, (arrays, two_shot) in enumerate(calls)
        ]
        device = Device(self.memory, seed=self.seed, patience=20 * BUDGET)
        device.run([spec for spec, _ in prepared])
        return [collect() for _, collect in prepared]

    def prepare(
        self, arrays, two_shot, ranks=None, weights=None, ids=None, scattered=False, number=0
    ):  # fmt: skip
        """The launch of one call, and a function that returns its results afterwards."""
        experts = 0 if weights is None else weights.shape[1]
        kernel = TailKernel(
            **self.facts,
            two_shot=two_shot,
            streams=self.streams and not two_shot,
            window=1,
            scattered=scattered,
            experts_per_token=experts,
        )
        compiled = compile_kernel(kernel, "sm_90a")
        tokens = arrays[0].shape[1]
        width = kernel.result_width
        places = [self.memory.allocate("operand", a, writable=False) for a in arrays]
        pair = [places[0], places[0]]
        if experts:
            pair = [self.memory.allocate("operand", a, writable=False) for a in (weights, ids)]
        num_bytes = self.ranks * tokens * width * 2
        out = self.memory.allocate("result", num_bytes)
        arguments = (
            places[0], *pair, *places[1:], out, self.address, self.layout.num_bytes,
            tokens, self.layout.columns, BUDGET, EPS,
        )  # fmt: skip
        grid = (kernel.grid[0], self.ranks if ranks is None else ranks, 1)
        spec = launch_spec(
            load(compiled.ptx, compiled.entry),
            *(grid, (kernel.threads, 1, 1), kernel.cluster, kernel.shared_bytes, arguments),
            overlaps_previous=number > 0,
            number=number,
        )

        def collect():
            data, written = self.memory.contents(out, num_bytes)
            ran = grid[1] * tokens * width * 2
            assert written[:ran].all()
            return data[:ran].view(BF16).reshape(grid[1], tokens, width)

        return spec, collect


SMALL = (2, 128, 64, 2, 1, 2, 4)
SHAPES = {
    2: SMALL,
    4: (4, 128, 128, 2, 2, 2, 2),
    8: (8, 128, 256, 2, 1, 2, 4),
    16: (16, 128, 512, 2, 1, 2, 4),
}


def loopback_of(ranks, streams=False, seed=None):
    """All ranks; calls of one shot stream their weights or keep them."""
    *shape, k_parts, warps = SHAPES[ranks]
    return Loopback(*shape, 1 if streams else k_parts, warps, streams=streams, seed=seed)


CALLS = [(False, False), (True, False), (False, True)]
"""Whether weights are streamed, and shots."""


def check(got, arrays):
    wanted = oracle(*arrays)
    for rank in range(1, len(got)):
        np.testing.assert_array_equal(bits(got[rank]), bits(got[0]))
    error = np.linalg.norm(got[0].astype(np.float64) - wanted)
    assert error <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ranks", fused.RANKS)
@pytest.mark.parametrize("seed", [None, 1])
def test_calls_of_changing_size_and_shots(streams, ranks, seed):
    rng = np.random.default_rng()
    loopback = loopback_of(ranks, streams, seed)
    most = 8 if streams else 9
    calls = ((1, False), (5, True), (most, False), (1, True), (1, False), (3, False), (9, True))
    for number, (tokens, two_shot) in enumerate(calls):
        arrays = loopback.draw(rng, tokens)
        check(loopback.call(arrays, two_shot), arrays)
        for rank in range(ranks):
            assert loopback.words(rank)[EPOCH_WORD] == number + 1
            assert loopback.words(rank)[PREVIOUS_WORD] == 2 * tokens + two_shot
            assert loopback.words(rank)[FAILED_WORD] == 0


@pytest.mark.parametrize("round_tokens", [2, 4, 8])
def test_most_tokens_take_several_rounds(round_tokens):
    loopback = Loopback(*SMALL, round_tokens=round_tokens)
    for two_shot, tokens in ((True, MAX_TOKENS), (False, 32)):
        arrays = loopback.draw(np.random.default_rng(), tokens)
        check(loopback.call(arrays, two_shot), arrays)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_calls_that_overlap_their_predecessor(streams, seed):
    rng = np.random.default_rng()
    loopback = loopback_of(4, streams, seed)
    calls = [
        (loopback.draw(rng, t), two_shot) for t, two_shot in ((5, True), (1, False), (8, False))
    ]
    calls += [(loopback.draw(rng, t), t > 4) for t in (3, 8, 2, 6)]
    for got, (arrays, _) in zip(loopback.chain(calls), calls, strict=True):
        check(got, arrays)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 3), (2, 8), (2, 9), (4, 17), (8, 8), (16, 5)])
def test_k3_s_blocks(ranks, tokens):
    """One cluster a rank of the geometry that K3 has.

    At TP=2 not all weights have a place: a tile takes that of another, or some are in registers.
    There a block has as many tiles as warps, so some warps take two.
    """
    facts = kernel_facts(ranks, 3584, 7168, tokens)
    geometry = TailGeometry(**facts)
    assert geometry.streams == (tokens <= 8 and ranks <= 8)
    assert (geometry.slots < geometry.tiles) == (ranks == 2 and tokens <= 8)
    assert (geometry.kept_steps < geometry.steps) == (ranks == 2 and tokens > 8)
    assert (geometry.pairs > 0) == (ranks == 2 and tokens <= 8)
    loopback = Loopback(
        ranks, 3584, geometry.rows * ranks, 8, 1, *(geometry.k_parts, geometry.warps),
        round_tokens=geometry.round_tokens, streams=geometry.streams,
    )  # fmt: skip
    for _ in range(1 + geometry.streams):  # the barriers of both calls are in the same memory
        arrays = loopback.draw(np.random.default_rng(), tokens)
        check(loopback.call(arrays, geometry.two_shot), arrays)


@pytest.mark.parametrize("latent_size", [256, 512])
def test_narrow_latents(latent_size):
    """A block has 32 columns of the narrowest latent, where streamed tiles are smallest."""
    facts = kernel_facts(2, latent_size, 1920, 8)
    geometry = TailGeometry(**facts)
    assert geometry.tiles == 5
    loopback = Loopback(
        2, latent_size, geometry.rows * 2, 8, 1, *(geometry.k_parts, geometry.warps),
        round_tokens=geometry.round_tokens, streams=geometry.streams,
    )  # fmt: skip
    arrays = loopback.draw(np.random.default_rng(), 8)
    check(loopback.call(arrays, geometry.two_shot), arrays)


def test_shots_have_the_same_bits():
    loopback = loopback_of(4)
    arrays = loopback.draw(np.random.default_rng(), 7)
    one, two = (loopback.call(arrays, two_shot) for two_shot in (False, True))
    np.testing.assert_array_equal(bits(one), bits(two))


def test_scattered_output_is_the_rank_s_columns():
    loopback = loopback_of(4)
    arrays = loopback.draw(np.random.default_rng(), 3)
    whole = loopback.call(arrays, False)
    parts = loopback.call(arrays, False, scattered=True)
    np.testing.assert_array_equal(bits(np.concatenate(parts, axis=1)), bits(whole[0]))


@pytest.mark.parametrize(("streams", "two_shot"), CALLS)
def test_unfinalised_rows_are_weighed_and_dropped_ones_never_count(streams, two_shot):
    rng = np.random.default_rng()
    loopback = loopback_of(4, streams)
    tokens, k = 5, 16
    latent, shared, gain, up = loopback.draw(rng, tokens)
    rows = rng.standard_normal((4, tokens, k, latent.shape[-1])).astype(BF16)
    weights = rng.random((tokens, k)).astype(np.float32)
    ids = rng.integers(0, 896, (tokens, k)).astype(np.int32)
    ids[rng.random((tokens, k)) < 0.3] = -1
    ids[2] = -1
    rows[:, ids < 0], weights[ids < 0] = np.nan, np.nan
    kept = np.where(ids[None, :, :, None] < 0, 0, rows.astype(np.float64))
    latent = np.einsum("rtkl,tk->rtl", kept, np.where(ids < 0, 0, weights)).astype(BF16)
    got = loopback.call((rows, shared, gain, up), two_shot, weights=weights, ids=ids)
    wanted = oracle(latent, shared, gain, up)
    assert np.linalg.norm(got[0].astype(np.float64) - wanted) <= 3e-3 * np.linalg.norm(wanted)
    np.testing.assert_array_equal(bits(got[3]), bits(got[0]))


@pytest.mark.parametrize(("streams", "two_shot"), CALLS)
def test_negative_zero_and_nan(streams, two_shot):
    rng = np.random.default_rng()
    loopback = loopback_of(4, streams)
    latent, shared, gain, up = loopback.draw(rng, 6)
    clean = loopback.call((latent, shared, gain, up), two_shot)
    latent[:, 0], shared[:, 0] = -0.0, -0.0
    payloads = (rng.integers(1, 128, 8) | rng.choice([0x7F80, 0xFF80], 8)).astype(np.uint16)
    latent[2, 3, 10:18] = payloads.view(BF16)
    shared[1, 1, 20:28] = payloads.view(BF16)
    got = loopback.call((latent, shared, gain, up), two_shot)
    np.testing.assert_array_equal(bits(got[:, 0]), 0)
    nan = np.isnan(got.astype(np.float32))
    assert nan[:, 3].all()
    assert nan[:, 1, 20:28].all()
    assert nan.sum() == nan[:, 3].sum() + nan[:, 1, 20:28].sum()
    np.testing.assert_array_equal(bits(got[:, (2, 4, 5)]), bits(clean[:, (2, 4, 5)]))


@pytest.mark.parametrize(("streams", "two_shot"), CALLS)
def test_a_rank_that_stays_away_ends_the_call_and_freezes_the_next(streams, two_shot):
    rng = np.random.default_rng()
    loopback = loopback_of(4, streams)
    arrays = loopback.draw(rng, 5)
    check(loopback.call(arrays, two_shot), arrays)
    got = loopback.call(arrays, two_shot, ranks=3)
    assert np.isnan(got.astype(np.float32)).any(axis=(1, 2)).all()
    for rank in range(3):
        assert loopback.words(rank)[FAILED_WORD] == 2
        assert loopback.words(rank)[AWAITED_WORD] == 3 or two_shot
    before = [loopback.words(rank)[HEADER_WORDS:].copy() for rank in range(4)]
    got = loopback.call(arrays, two_shot, ranks=3)
    assert np.isnan(got.astype(np.float32)).all()
    for rank in range(4):
        np.testing.assert_array_equal(loopback.words(rank)[HEADER_WORDS:], before[rank])


@pytest.mark.slow
@pytest.mark.parametrize("experts_per_token", [0, 16])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_geometry_of_k3_spills(arch, experts_per_token):
    for kernel in {
        TailKernel(**kernel_facts(ranks, 3584, 7168, tokens, experts_per_token))
        for ranks in fused.RANKS
        for tokens in (4, 8, 9, 32, 33, 128)
    }:
        for report in sass.inspect_cubin(compile_kernel(kernel, arch).cubin):
            assert not report.spills, kernel


@pytest.mark.parametrize("label", REPRESENTATIVES)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for_every_architecture_within_its_limits(label, arch):
    kernel = REPRESENTATIVES[label]
    compiled = compile_kernel(kernel, arch)
    assert compiled.cubin
    assert kernel.threads <= (640 if kernel.streams else 512)
    assert kernel.shared_bytes <= 232448
    assert kernel.rows * kernel.groups * kernel.ranks == kernel.hidden_size
    assert "multimem" not in compiled.ptx


@pytest.mark.parametrize("label", MULTICASTS)
def test_multicast_stores_compile_and_are_the_only_ones_to_that_address(label):
    kernel = MULTICASTS[label]
    compiled = compile_kernel(kernel, "sm_100a")
    (report,) = sass.inspect_cubin(compiled.cubin)
    assert not report.spills
    stores = [line for line in compiled.ptx.splitlines() if "multimem" in line]
    # One for each thing that goes to all ranks: partial or finished latents, and the output.
    assert len([line for line in stores if ".v4." in line]) == len(stores) >= 2
    for other in ("sm_90a", "sm_103a"):
        with pytest.raises(NotImplementedError, match="sm_100a"):
            compile_kernel(kernel, other)
    with pytest.raises(UnknownInstructionError, match="multimem"):
        load(compiled.ptx, compiled.entry)
