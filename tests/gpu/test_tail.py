"""The fused tail on GPUs: all ranks on one card, and one rank a card through jax.jit."""

import importlib.util
import itertools
import struct

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.ops.tail import fused
from k3jax.parallel import RankGroup
from k3jax.runtime.target import Target
from k3jax.runtime.workspace import EPOCH_WORD, FAILED_WORD
from tests.gpu.driver import Driver
from tests.ops.tail_oracle import BF16, EPS, draw, oracle
from tests.support import bits, parallel_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]

LATENT = 3584
LOOPBACKS = {2: (3584, 7, 1), 4: (1536, 3, 2), 8: (512, 1, 2), 16: (512, 1, 2)}
"""Hidden width, clusters of a rank and parts of K with which all ranks' blocks fit one card."""

BUDGET = 1 << 22
MAX_TOKENS = 128
MOST_TOKENS = {"one shot": 32, "two shots": MAX_TOKENS, "streamed": 8}
"""By kernel: a rank's weights kept, or streamed."""
BUSY_BLOCKS = 264

SOAK_STEPS = 10_000
SOAK_BATCH = 50
SOAK_TOKENS = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 128)


def tails(ranks, hidden_size, groups, k_parts):
    """The kernels of one rank, by name, and their machine code."""
    from k3jax.ops.tail.kernel_tail import TailKernel
    from k3jax.runtime.compile import compile_kernel

    for name in MOST_TOKENS if k_parts == 1 else ("one shot", "two shots"):
        kernel = TailKernel(
            ranks=ranks, latent_size=LATENT, hidden_size=hidden_size, max_tokens=MAX_TOKENS,
            groups=groups, k_blocks=8, k_parts=k_parts, two_shot=name == "two shots",
            round_tokens=1 if name == "streamed" else 4, streams=name == "streamed",
            warps=4 if ranks == 16 else 16,
        )  # fmt: skip
        yield name, kernel, compile_kernel(kernel, Target.current().arch)


def kernels_for(functions, tokens):
    """Names of the kernels that take so many tokens."""
    return [name for name in functions if tokens <= MOST_TOKENS[name]]


def encode(addresses, numbers):
    return [
        *(struct.pack("<Q", address) for address in addresses),
        *(struct.pack("<i", number) for number in numbers),
        struct.pack("<f", EPS),
    ]


class Loopback:
    """All ranks as block groups of one launch."""

    def __init__(self, ranks):
        self.ranks, self.hidden = ranks, LOOPBACKS[ranks][0]
        self.driver, self.functions = Driver(), {}
        for name, kernel, compiled in tails(ranks, *LOOPBACKS[ranks]):
            function = self.driver.function(compiled.cubin, compiled.entry, kernel.shared_bytes)
            self.functions[name] = kernel, function
        self.layout = kernel.layout
        stride = self.layout.num_bytes
        self.address = self.driver.upload(np.zeros(ranks * stride, np.uint8))
        peers = [self.address + rank * stride for rank in range(ranks)]
        armed = np.concatenate([self.layout.armed(rank, peers) for rank in range(ranks)])
        self.driver.write(self.address, armed)

    def call(self, arrays, name):
        kernel, function = self.functions[name]
        tokens = arrays[0].shape[1]
        places = [self.driver.upload(array.view(np.uint8)) for array in arrays]
        num_bytes = self.ranks * tokens * self.hidden * 2
        out = self.driver.upload(np.full(num_bytes, 0xAB, np.uint8))
        addresses = (*[places[0]] * 3, *places[1:], out, self.address)
        numbers = (self.layout.num_bytes, tokens, self.layout.columns, BUDGET)
        self.driver.launch(
            function, (kernel.grid[0], self.ranks, 1), kernel.threads, kernel.cluster,
            kernel.shared_bytes, encode(addresses, numbers), False,
        )  # fmt: skip
        data = self.driver.download(out, num_bytes)
        for address in (*places, out):
            self.driver.free(address)
        return data.view(BF16).reshape(self.ranks, tokens, self.hidden)

    def header(self, rank):
        at = self.address + rank * self.layout.num_bytes
        return self.driver.download(at, 256).view(np.uint32)


class Card:
    """Some ranks of two as one launch, on a stream of their own, and another stream beside it."""

    def __init__(self, driver, ranks):
        from k3jax.runtime.compile import compile_kernel
        from tests.gpu.busy import Busy

        self.driver, self.ranks, self.functions = driver, ranks, {}
        self.hidden = LOOPBACKS[2][0]
        for name, kernel, compiled in tails(2, *LOOPBACKS[2]):
            function = driver.function(compiled.cubin, compiled.entry, kernel.shared_bytes)
            self.functions[name] = kernel, function
        self.layout = kernel.layout
        self.stream, self.other = driver.stream(), driver.stream()
        compiled = compile_kernel(Busy(), Target.current().arch)
        self.busy = driver.function(compiled.cubin, compiled.entry, 0)
        self.memory = driver.upload(np.zeros(BUSY_BLOCKS * 1024, np.uint8))
        self.workspace = driver.upload(np.zeros(len(ranks) * self.layout.num_bytes, np.uint8))
        self.most_bytes = SOAK_BATCH * len(ranks) * MAX_TOKENS * self.hidden * 2
        self.outputs = driver.upload(np.zeros(self.most_bytes, np.uint8))

    def workspaces(self):
        return [self.workspace + i * self.layout.num_bytes for i in range(len(self.ranks))]

    def put(self, arrays):
        """The ranks' operands on their device."""
        latent, shared, gain, up_proj = arrays
        own = (latent[self.ranks], shared[self.ranks], gain, up_proj)
        return [self.driver.upload(array.view(np.uint8)) for array in own]

    def poison(self):
        self.driver.fill(self.outputs, 0xAB, self.most_bytes)
        self.driver.wait(None)

    def start(self, first_row, places, tokens, name):
        """A call whose results begin at a row of `outputs`."""
        kernel, function = self.functions[name]
        out = self.outputs + first_row * self.hidden * 2
        addresses = (*[places[0]] * 3, *places[1:], out, self.workspace)
        numbers = (self.layout.num_bytes, tokens, self.layout.columns, BUDGET)
        self.driver.launch(
            function, (kernel.grid[0], len(self.ranks), 1), kernel.threads, kernel.cluster,
            kernel.shared_bytes, encode(addresses, numbers), False, self.stream,
        )  # fmt: skip

    def spend(self, microseconds, blocks, stream):
        """Keeps some blocks busy."""
        arguments = [struct.pack("<Q", self.memory), struct.pack("<i", 1000 * microseconds)]
        self.driver.launch(
            self.busy, (blocks, 1, 1), 256, (1, 1, 1), 0, arguments, False, stream
        )  # fmt: skip

    def results(self, tokens):
        """What calls of so many tokens, one after another, have left: [ranks, T, H] of each."""
        rows = len(self.ranks) * np.cumsum([0, *tokens])
        data = self.driver.download(self.outputs, rows[-1] * self.hidden * 2).view(np.uint16)
        shape = (len(self.ranks), -1, self.hidden)
        return [
            data[first * self.hidden : last * self.hidden].reshape(shape)
            for first, last in itertools.pairwise(rows)
        ]

    def headers(self):
        return [self.driver.download(at, 256).view(np.uint32) for at in self.workspaces()]


def check(got, wanted):
    for rank in range(1, len(got)):
        np.testing.assert_array_equal(bits(got[rank]), bits(got[0]))
    error = np.linalg.norm(np.asarray(got[0], np.float64) - wanted)
    assert error <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("ranks", fused.RANKS)
def test_all_ranks_on_one_card(ranks):
    rng = np.random.default_rng()
    loopback = Loopback(ranks)
    calls = 0
    for tokens in (1, 2, 5, 8, 9, 31, 32, 33, 64, 65, 128, 1, 127, 3):
        arrays = draw(rng, ranks, tokens, LATENT, loopback.hidden)
        wanted = oracle(*arrays)
        for name in kernels_for(loopback.functions, tokens):
            check(loopback.call(arrays, name), wanted)
            calls += 1
    for rank in range(ranks):
        assert loopback.header(rank)[FAILED_WORD] == 0
        assert loopback.header(rank)[EPOCH_WORD] == calls


def need_devices(count):
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs, there are {len(jax.devices())}")


@pytest.mark.parametrize("cards", [1, 2])
def test_soak(cards):
    """Changing sizes and kernels, blocks late at random, another kernel in the way: the same bits.

    Half of the steps are captured and replayed. On two cards, each rank's launches wait at random;
    on one, both ranks' blocks are one launch, and those that the other kernel keeps out are late.
    """
    need_devices(cards)
    each = 2 // cards
    group = [Card(Driver(i), range(i * each, (i + 1) * each)) for i in range(cards)]
    if cards == 2:
        group[0].driver.reach(group[1].driver)
        group[1].driver.reach(group[0].driver)
    peers = [address for card in group for address in card.workspaces()]
    for card in group:
        for rank, address in zip(card.ranks, card.workspaces(), strict=True):
            card.driver.write(address, card.layout.armed(rank, peers))
    rng = np.random.default_rng()
    draws = [draw(rng, 2, tokens, LATENT, group[0].hidden) for tokens in SOAK_TOKENS]
    places = [[card.put(arrays) for card in group] for arrays in draws]
    wanted = {}
    for batch in range(SOAK_STEPS // SOAK_BATCH):
        sizes = rng.permutation(np.arange(SOAK_BATCH) % len(SOAK_TOKENS))
        names = soak(rng, group, sizes, places, captured=bool(batch % 2))
        tokens = [SOAK_TOKENS[size] for size in sizes]
        results = zip(*[card.results(tokens) for card in group], strict=True)
        for size, name, parts in zip(sizes, names, results, strict=True):
            case = size, name == "streamed"  # it adds a product's terms in another order
            ranks = [rank for part in parts for rank in part]
            if case not in wanted:
                check([rank.view(BF16) for rank in ranks], oracle(*draws[size]))
                wanted[case] = ranks[0].copy()
            for rank in ranks:
                assert np.array_equal(rank, wanted[case]), (batch, SOAK_TOKENS[size], name)
    for header in [header for card in group for header in card.headers()]:
        assert (header[EPOCH_WORD], header[FAILED_WORD]) == (SOAK_STEPS, 0)


def soak(rng, group, sizes, places, captured):
    """One batch of steps, issued one by one, or captured on every card and replayed.

    Returns which kernels they took.
    """
    names = [rng.choice(kernels_for(group[0].functions, SOAK_TOKENS[size])) for size in sizes]
    for card in group:
        card.poison()
    for card in group:
        if captured:
            card.driver.capture(card.stream)
        for _ in range(8):
            card.spend(int(rng.integers(100)), int(rng.integers(1, BUSY_BLOCKS)), card.other)
    first_row = 0
    for size, name in zip(sizes, names, strict=True):
        tokens = SOAK_TOKENS[size]
        late = rng.integers(12)
        for i, card in enumerate(group):
            if late == i:
                card.spend(int(rng.integers(300)), 1, card.stream)
            card.start(first_row * len(card.ranks), places[size][i], tokens, name)
        first_row += tokens
    for card in group:
        if captured:
            card.driver.replay(card.stream)
    for card in group:
        card.driver.wait(card.stream)
    return names


@pytest.fixture(params=fused.RANKS)
def group(request):
    """Ranks, their workspaces, and the tail under jit, captured into a CUDA graph or not."""
    ranks = request.param
    need_devices(ranks)
    workspaces = fused.tail_workspaces(jax.devices()[:ranks], LATENT, 7168)
    workspaces.create()

    def local(latent, shared, gain, up_proj):
        y = fused.fused_tail(
            latent[0], shared[0], gain, up_proj,
            eps=EPS, group=RankGroup(ranks, "tp"), target=Target.current(),
        )  # fmt: skip
        return y[None]

    split = P("tp")
    mapped = jax.shard_map(
        local, mesh=parallel_of(ranks).mesh, in_specs=(split, split, P(), P()), out_specs=split
    )

    def jitted(captured):
        size = 1 if captured else 1_000_000
        return jax.jit(mapped, compiler_options={"xla_gpu_graph_min_graph_size": size})

    return ranks, workspaces, jitted


def test_one_rank_a_card(group):
    ranks, workspaces, jitted = group
    rng = np.random.default_rng()
    step = jitted(captured=True)
    for tokens in (1, 8, 9, 32, 33, 64, 128, 1, 128, 7):
        arrays = draw(rng, ranks, tokens, LATENT, 7168)
        check(np.asarray(step(*arrays)), oracle(*arrays))
    workspaces.check()


def test_replayed_and_issued_calls_have_the_same_bits(group):
    ranks, workspaces, jitted = group
    rng = np.random.default_rng()
    captured, issued = jitted(captured=True), jitted(captured=False)
    for tokens in (1, 8, 64):
        draws = [draw(rng, ranks, tokens, LATENT, 7168) for _ in range(4)]
        outputs = [np.asarray(captured(*arrays)) for arrays in draws]
        for arrays, y in zip(draws, outputs, strict=True):
            np.testing.assert_array_equal(bits(y), bits(issued(*arrays)))
    workspaces.check()
