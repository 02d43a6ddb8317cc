"""One rank of the fused tail alone, its peers' words being there already, in the emulator."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.bench import solo
from k3jax.config import MoEConfig
from k3jax.runtime.program import Workspace
from k3jax.runtime.target import Target
from k3jax.runtime.workspace import EPOCH_WORD, FAILED_WORD
from tests.emulator import GlobalMemory, run_programs
from tests.ops.tail_oracle import oracle
from tests.support import bits

CONFIG = MoEConfig(
    hidden_size=64,
    latent_size=256,
    num_experts=8,
    experts_per_token=4,
    expert_intermediate_size=64,
    num_shared_experts=1,
)
TARGET = dataclasses.replace(Target.named("h200"), num_sms=4)


def draw_up(rng, one):
    rows = rng.standard_normal((one.layout.columns, CONFIG.latent_size)) / 16
    return jnp.asarray(rows, jnp.bfloat16)


@pytest.mark.parametrize(("ranks", "num_tokens"), [(2, 3), (2, 33)])
def test_each_call_finds_what_its_peers_send(ranks, num_tokens):
    """Four calls, so that every slot is used again; one and two shots."""
    rng = np.random.default_rng()
    one = solo.SoloRank.draw(CONFIG, TARGET, ranks, num_tokens, rng)
    memory = GlobalMemory()
    size = one.layout.num_bytes
    own, peers = (memory.allocate(name, np.zeros(size, np.uint8)) for name in ("own", "peers"))
    addresses = [peers] * ranks
    addresses[one.rank] = own
    start = own - memory.BASE
    words = memory.data[start : start + size].view(np.uint32)
    words[:] = one.layout.armed(one.rank, addresses)

    program = solo.with_refill(one.tail(), one.refill(), times=int(rng.integers(1, 3)))
    assert [spec.shape for spec in program.operands][-1] == one.image().shape
    for call in range(4):
        up = draw_up(rng, one)
        rows = [a[one.rank] for a in (one.latent, one.shared)]
        operands = [*rows, one.gain, np.asarray(up), one.image()]
        slots = [{one.layout.slot: own}]
        (emulation,) = run_programs([program], [operands], memory=memory, workspaces=slots)
        got, want = emulation.results[0], one.want(up)
        mine = np.zeros(CONFIG.hidden_size, bool)
        mine[one.columns] = True
        np.testing.assert_array_equal(bits(got[:, ~mine]), bits(want[:, ~mine]))
        error = got[:, mine].astype(np.float64) - want[:, mine].astype(np.float64)
        assert np.linalg.norm(error) <= 1e-3 * np.linalg.norm(want[:, mine].astype(np.float64))
        words = memory.data[start : start + 256].view(np.uint32)
        assert (words[EPOCH_WORD], words[FAILED_WORD]) == (call + 1, 0)


def test_what_it_wants_is_the_rank_s_part_of_the_whole_tail():
    rng = np.random.default_rng()
    one = solo.SoloRank.draw(CONFIG, TARGET, 4, 5, rng)
    up = draw_up(rng, one)
    whole = np.zeros((CONFIG.hidden_size, CONFIG.latent_size), np.float32)
    whole[one.columns] = np.asarray(up, np.float32)
    want = oracle(one.latent, one.shared, one.gain, whole)[:, one.columns]
    got = one.want(up)[:, one.columns].astype(np.float32)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)


def test_the_workspace_becomes_an_operand():
    one = solo.SoloRank.draw(CONFIG, TARGET, 2, 3, np.random.default_rng())
    both = solo.with_refill(one.tail(), one.refill())
    program = solo.on_operands(both, one.layout)
    assert len(program.operands) == len(both.operands) + 2
    arguments = [value for launch in program.launches for value in launch.arguments]
    assert not any(isinstance(value, Workspace) for value in arguments)
    used = {value.index for value in arguments if isinstance(value, solo.Operand)}
    assert used == set(range(len(program.operands) - 1))  # but for what it comes after
    assert len(solo.with_refill(one.tail(), one.refill(), 2).launches) == len(both.launches) + 1
