"""Tier choices: from static facts alone, each with its reason, never silent."""

import pytest
from jax.sharding import AbstractMesh

from k3jax.config import MoEConfig
from k3jax.ops.experts.api import ExpertsTier
from k3jax.ops.tail.api import TailTier
from k3jax.parallel import Parallel
from k3jax.plan import plan_layer
from k3jax.runtime.target import Target
from tests.support import data_and_tensor_parallel, parallel_of

K3 = MoEConfig.kimi_k3()


@pytest.mark.parametrize(
    ("num_tokens", "tail"),
    [
        (0, TailTier.ALLREDUCE_OVERLAP),
        (256, TailTier.ALLREDUCE_OVERLAP),
        (257, TailTier.COLUMN_PARALLEL),
        (4096, TailTier.COLUMN_PARALLEL),
    ],
)
def test_tail_by_token_count(num_tokens, tail):
    assert plan_layer(K3, num_tokens, tp=8, target="cpu").tail.tier == tail


@pytest.mark.parametrize(
    ("target", "num_tokens", "experts"),
    [
        ("h200", 128, ExpertsTier.DECODE),
        ("h200", 129, ExpertsTier.GROUPED),
        ("b200", 256, ExpertsTier.DECODE),
        ("b200", 257, ExpertsTier.XLA),
    ],
)
def test_experts_by_token_count(target, num_tokens, experts):
    """Decode serves more tokens where nothing else does."""
    plan = plan_layer(K3, num_tokens, tp=8, target=target, packed=True)
    assert plan.experts.tier == experts


def test_overlap_limit_moves_the_crossover():
    plan = plan_layer(K3, 65, tp=8, target="cpu", overlap_limit=64)
    assert plan.tail.tier == TailTier.COLUMN_PARALLEL
    assert "past the overlap limit of 64 tokens" in plan.tail.reason


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (K3, {"tp": 1}, "nothing to reduce"),
        (K3, {"tp": 8, "output": "scattered"}, "output is scattered"),
    ],
)
def test_unfused_says_why(config, options, reason):
    plan = plan_layer(config, 8, target="cpu", **options)
    assert plan.tail.tier == TailTier.UNFUSED
    assert reason in plan.tail.reason


def test_every_declined_tier_has_its_reason():
    plan = plan_layer(K3, 8, tp=8, target="cpu")
    declined = dict(plan.tail.declined)
    assert declined[TailTier.TAIL_FUSION]
    assert all(reason for reason in declined.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "tail_fusion", "tp": 1}, "tail='tail_fusion' cannot run here: tp is 1"),
        ({"tail": "column_parallel", "output": "scattered"}, "output is scattered"),
        ({"tail": "fastest"}, r"tail='fastest' is not a tier; choose one of \['unfused'"),
        ({"experts": "dense"}, "experts='dense' is not a tier"),
        ({"tp": 5}, "tp=5 does not divide"),
        ({"num_tokens": -1}, "num_tokens=-1 must be 0 or more"),
        ({"output": "split"}, "output='split' must be"),
        ({"target": "tpu"}, "target='tpu' is not known"),
    ],
)
def test_what_cannot_run_is_refused_in_words(options, message):
    arguments = {"num_tokens": 8, "tp": 8, "target": "cpu"} | options
    with pytest.raises(ValueError, match=message):
        plan_layer(K3, **arguments)


def test_forced_tiers_are_taken():
    plan = plan_layer(K3, 8, tp=8, target="cpu", tail="column_parallel", experts="reference")
    assert plan.tail.tier == TailTier.COLUMN_PARALLEL
    assert plan.experts.tier == ExpertsTier.REFERENCE
    assert plan.tail.reason == "asked for"


def test_plans_are_equal_on_all_ranks():
    """Nothing but the arguments enters: two plans of the same facts are equal and hash alike."""
    first, second = (plan_layer(K3, 8, tp=8, target=Target.named("b200")) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_the_log_line_names_every_choice():
    line = str(plan_layer(K3, 300, tp=8, target="b200"))
    assert "300 tokens, tp=8, b200" in line
    assert "tail=column_parallel (past the overlap limit" in line


@pytest.mark.parametrize(
    ("options", "tail", "reason"),
    [
        ({}, TailTier.TAIL_FUSION, "measured as faster up to 128 tokens"),
        ({"num_tokens": 64, "output": "scattered"}, TailTier.TAIL_FUSION, "up to 128 tokens"),
        ({"num_tokens": 128}, TailTier.TAIL_FUSION, "up to 128 tokens"),
        ({"num_tokens": 129}, TailTier.COLUMN_PARALLEL, "num_tokens=129 is not in 1..128"),
        ({"tp": 8}, TailTier.ALLREDUCE_OVERLAP, "not measured as faster on 8 x h200"),
        ({"tp": 32}, TailTier.ALLREDUCE_OVERLAP, "ranks=32 is not one of"),
        ({"target": "b200"}, TailTier.ALLREDUCE_OVERLAP, "not measured as faster on 2 x b200"),
        ({"one_process": False}, TailTier.ALLREDUCE_OVERLAP, "a group spans processes"),
    ],
)
def test_the_fused_tail_is_taken_where_it_was_measured_as_faster(options, tail, reason):
    plan = plan_layer(K3, **{"num_tokens": 8, "tp": 2, "target": "h200"} | options)
    assert plan.tail.tier == tail
    assert reason in (dict(plan.tail.declined).get(TailTier.TAIL_FUSION) or plan.tail.reason)


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({}, TailTier.COLUMN_PARALLEL),
        ({"overlap_limit": 200}, TailTier.ALLREDUCE_OVERLAP),
        ({"one_process": False}, TailTier.ALLREDUCE_OVERLAP),
        ({"tp": 8}, TailTier.ALLREDUCE_OVERLAP),
        ({"target": "b200"}, TailTier.ALLREDUCE_OVERLAP),
        ({"output": "scattered"}, TailTier.UNFUSED),
    ],
)
def test_all_reduces_are_not_overlapped_where_merging_them_was_measured_as_faster(options, tail):
    plan = plan_layer(K3, **{"num_tokens": 200, "tp": 2, "target": "h200"} | options)
    assert plan.tail.tier == tail


def test_devices_of_one_process_are_known_as_such():
    assert parallel_of(8).one_process
    assert data_and_tensor_parallel().one_process
    assert not Parallel(AbstractMesh((2,), ("tp",))).one_process, "devices are not known yet"
