"""A thousand calls of the expert kernels beside another kernel: the same bits every time."""

import contextlib
import dataclasses
import functools
import importlib.util
import struct
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from k3jax.config import MoEConfig
from k3jax.ops.experts import decode, grouped
from k3jax.ops.experts.api import ExpertsTier, routed_experts
from k3jax.ops.experts.check import random_experts
from k3jax.ops.experts.packing import pack_experts
from k3jax.runtime.target import Target
from tests.gpu.driver import Driver
from tests.gpu.on_card import CardProgram
from tests.support import ONE_OP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]

STEPS = 1000
TP = 8
CONFIG = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=128)
TIERS = {
    "decode": (decode.decode_program, (1, 2, 7, 8, 33, 64, 65, 128)),
    "grouped": (grouped.grouped_program, (8, 129, 200, 512)),
}


@contextlib.contextmanager
def contender():
    """Streams memory through every multiprocessor, from before the context until it ends."""
    from k3jax.runtime.compile import compile_kernel
    from tests.runtime.toy import Scale

    count, launched = 1 << 25, [0]
    running, stop = threading.Event(), threading.Event()

    def work():
        driver = Driver()  # a context belongs to a thread
        stream, kernel = driver.stream(), Scale()
        compiled = compile_kernel(kernel, Target.current().arch)
        function = driver.function(compiled.cubin, compiled.entry, 0)
        x, y = (driver.upload(np.zeros(count, np.float32)) for _ in range(2))
        arguments = [
            *(struct.pack("<Q", address) for address in (x, y)),
            struct.pack("<i", count),
            struct.pack("<f", 2.0),
        ]
        while not stop.is_set():
            for _ in range(8):
                driver.launch(
                    function, (count // 128, 1, 1), 128, (1, 1, 1), 0, arguments, False, stream
                )
            driver.wait(stream)
            launched[0] += 8
            running.set()
        driver.free(x)
        driver.free(y)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert running.wait(60)
        yield launched
    finally:
        stop.set()
        thread.join()


def draw(num_tokens, rng):
    """z, ids and weights; some ids are -1."""
    ids = rng.permuted(np.tile(np.arange(128, dtype=np.int32), (num_tokens, 1)), axis=1)
    ids = np.where(rng.random((num_tokens, 16)) < 0.05, -1, ids[:, :16])
    z = rng.standard_normal((num_tokens, CONFIG.latent_size)).astype(ml_dtypes.bfloat16)
    return z, ids, rng.uniform(0.02, 0.12, ids.shape).astype(np.float32)


class Call:
    """One token count: its operands on the device, and the bits of its first run."""

    def __init__(self, driver, build, rows, packed, want):
        program = build(CONFIG, len(want), TP, Target.current())
        self.card = CardProgram(driver, program, Target.current().arch)
        self.operands = [*jax.device_put(rows), packed.gate_up, packed.down]
        jax.block_until_ready(self.operands)
        self.first = self.run()
        got = self.first.view(ml_dtypes.bfloat16).astype(np.float64).reshape(want.shape)
        assert np.linalg.norm(got - want) < ONE_OP * np.linalg.norm(want)

    def run(self) -> np.ndarray:
        """The bits of a call whose results and scratch were poisoned."""
        self.card.run([operand.unsafe_buffer_pointer() for operand in self.operands])
        return self.card.outputs()[0].view(np.uint16)


@pytest.mark.parametrize("tier", TIERS)
def test_the_same_bits_beside_another_kernel(tier):
    build, token_counts = TIERS[tier]
    rng = np.random.default_rng()
    experts = random_experts(CONFIG, TP, jax.random.key(int(rng.integers(1 << 31))))
    packed = jax.block_until_ready(jax.jit(pack_experts)(experts))
    driver = Driver()
    # All tokens as one batch of the plain implementation, which compiles once.
    rows = draw(sum(token_counts), rng)
    plain = functools.partial(routed_experts, config=CONFIG, tier=ExpertsTier.XLA)
    want = np.asarray(jax.jit(plain)(*rows, experts), np.float64)
    parts = zip(
        *(np.split(array, np.cumsum(token_counts)[:-1]) for array in (*rows, want)), strict=True
    )
    calls = [Call(driver, build, part[:3], packed, part[3]) for part in parts]
    with contender() as launched:
        for step in range(STEPS):
            number = int(rng.integers(len(calls)))
            call = calls[number]
            differing = np.count_nonzero(call.run() != call.first)
            assert differing == 0, f"step {step}, {token_counts[number]} tokens"
    assert launched[0] > STEPS // 10
