"""What XLA makes of the layer at K3's size for 8 GPUs: collectives, copies, temporaries."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.ops.experts.packing import packed_infos
from k3jax.parallel import Parallel
from k3jax.params import abstract_params, param_specs
from k3jax.plan import plan_layer
from k3jax.runtime import ffi
from tests.device_free import compile_apart, gpu_mesh, instructions, result_bytes

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA plugin (no CUDA libraries)")

pytest.importorskip("cutlass", reason="needs the CuTe DSL")

K3 = MoEConfig.kimi_k3()
TP = 8
UP_PROJECTION = K3.hidden_size * K3.latent_size * 2


def lower(kind: str, num_tokens: int, tail: str | None = None, packed: bool = False):
    parallel = Parallel(gpu_mesh(kind, TP))
    experts = packed_infos(K3, TP) if packed else None
    params = jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=parallel.sharding(spec)
        ),
        abstract_params(K3, experts),
        param_specs(K3, "tp", experts),
    )
    x = jax.ShapeDtypeStruct((num_tokens, 7168), jnp.bfloat16, sharding=parallel.sharding(P()))
    plan = plan_layer(K3, num_tokens, tp=TP, target=kind, tail=tail, packed=packed)
    layer = functools.partial(moe_layer, config=K3, parallel=parallel, plan=plan)
    return jax.jit(layer).lower(params, x)


@functools.cache
def compiled(kind: str, num_tokens: int, tail: str):
    return lower(kind, num_tokens, tail).compile()


@functools.cache
def lowered(num_tokens: int, tail: str) -> str:
    """The program before XLA's passes: dependencies as the library wrote them."""
    return lower("h200", num_tokens, tail).as_text(dialect="hlo", debug_info=True)


def depends_on(text: str, line: str, wanted: str) -> bool:
    """Whether the instruction on `line` reads, at any distance, one whose line holds `wanted`."""
    by_name = {}
    for other in text.splitlines():
        name, _, rest = other.strip().removeprefix("ROOT ").partition(" = ")
        if rest:
            by_name[name] = rest
    seen, queue = set(), [line.strip().removeprefix("ROOT ").partition(" = ")[2]]
    while queue:
        rest = queue.pop()
        if wanted in rest:
            return True
        for word in rest.replace("(", " ").replace(")", " ").replace(",", " ").split():
            if word in by_name and word not in seen:
                seen.add(word)
                queue.append(by_name[word])
    return False


@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_overlap_tier_reduces_twice_and_apart(kind):
    """Latent and shared are reduced by two all-reduces, never merged into one."""
    text = compiled(kind, 8, "allreduce_overlap").as_text()
    sizes = sorted(result_bytes(line) for line in instructions(text, "all-reduce"))
    assert sizes == [8 * 3584 * 4, 8 * 7168 * 4]


@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_column_tier_reduces_shared_and_routed_columns_at_once(kind):
    text = compiled(kind, 512, "column_parallel").as_text()
    sizes = sorted(result_bytes(line) for line in instructions(text, "all-reduce"))
    assert sizes == [512 * 7168 * 2, 512 * 3584 * 4]


@pytest.mark.parametrize(
    ("num_tokens", "tail"), [(8, "allreduce_overlap"), (512, "column_parallel")]
)
@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_nothing_is_gathered_and_no_weight_is_copied(kind, num_tokens, tail):
    program = compiled(kind, num_tokens, tail)
    text = program.as_text()
    assert not instructions(text, "all-gather")
    for opcode in ("copy", "transpose"):
        assert all(result_bytes(line) < UP_PROJECTION for line in instructions(text, opcode))
    rows = num_tokens * K3.experts_per_token * K3.latent_size * 4
    one_expert = 3 * K3.latent_size * (K3.expert_intermediate_size // TP) * 4
    assert program.memory_analysis().temp_size_in_bytes < 4 * rows + 4 * one_expert + 2**24


def up_projection_flops(num_tokens: int, tail: str) -> list[int]:
    """Multiply-adds of each dot whose inner width is the latent and whose rows are hidden rows."""
    text = lowered(num_tokens, tail)
    dots = [line for line in instructions(text, "dot") if "tl,hl" in line]
    return [result_bytes(line) // 4 * K3.latent_size for line in dots]


def test_column_tier_does_its_share_of_the_up_projection():
    full = up_projection_flops(512, "allreduce_overlap")
    share = up_projection_flops(512, "column_parallel")
    assert full == [512 * 7168 * 3584]
    assert share == [full[0] // TP]


def test_overlap_tier_s_shared_reduce_does_not_wait_for_the_up_projection():
    text = lowered(8, "allreduce_overlap")
    shared = [line for line in instructions(text, "all-reduce") if "[8,7168]" in line]
    assert len(shared) == 1
    assert not depends_on(text, shared[0], "tl,hl")
    assert depends_on(text, shared[0], "tk,mk"), "the walk sees the shared expert's products"
    columns = lowered(512, "column_parallel")
    assert any(depends_on(columns, r, "tl,hl") for r in instructions(columns, "all-reduce")), (
        "the walk sees the up-projection where there is one"
    )


def lower_decode_step(kind: str, num_tokens: int):
    """A decode step on kernels, for `compile_apart`."""
    return lower(kind, num_tokens, packed=True)


def lower_without_handler(kind: str):
    """The same in a process that never told XLA about our handlers."""
    ffi.register = lambda: None
    return lower_decode_step(kind, 1)


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_a_decode_step_is_two_of_our_calls_in_one_command_buffer(kind, num_tokens, tmp_path):
    report = compile_apart(lower_decode_step, tmp_path, kind, num_tokens)
    assert report.hlo.count('custom_call_target="k3jax_launch"') == 2
    buffers = report.command_buffers_of("kCustomCall")
    assert len(buffers) == 2
    assert buffers[0] is not None
    assert buffers[0] == buffers[1]
    assert not instructions(report.hlo, "all-gather")
    for opcode in ("copy", "transpose"):
        copies = instructions(report.hlo, opcode)
        assert all(result_bytes(line) < UP_PROJECTION for line in copies)
    rows = num_tokens * K3.experts_per_token * (K3.latent_size + K3.expert_intermediate_size // TP)
    assert report.temp_bytes < 4 * rows + 2**23


def test_a_missing_handler_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RuntimeError, match="k3jax_launch"):
        compile_apart(lower_without_handler, tmp_path, "h200")
