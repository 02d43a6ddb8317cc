import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.runtime import compile as kernel_compile
from k3jax.runtime.ffi import call_program, platform_choice
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target
from tests.runtime.toy import Scale, chain_program, scale_program

H200 = Target.named("h200")
COUNT = 1000


def scale(x, factor=2.0):
    return call_program(scale_program(x.size, factor), x, target=H200)[0]


chosen = platform_choice(scale, lambda x: 2.0 * x)


def lower(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def mesh(*names, axis_type=AxisType.Auto):
    sizes = {1: (8,), 2: (2, 4)}[len(names)]
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names))


def sharded(count, over, axis="tp"):
    return jax.ShapeDtypeStruct((count,), jnp.float32, sharding=NamedSharding(over, P(axis)))


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng().standard_normal(COUNT), jnp.float32)


def test_cpu_runs_the_reference_and_compiles_nothing(x, monkeypatch):
    monkeypatch.setattr(kernel_compile, "counts", kernel_compile.CompileCounts())
    for run in (chosen, jax.jit(chosen)):
        np.testing.assert_array_equal(run(x), 2.0 * np.asarray(x))
    assert kernel_compile.counts == kernel_compile.CompileCounts()


def test_cuda_lowering_is_one_call_with_the_cubins(x):
    program = chain_program(COUNT, 2.0, 3.0)
    text = lower(lambda x: call_program(program, x, target=H200)[0], x).as_text()
    assert text.count("@k3jax_launch") == 1
    attributes = dict(re.findall(r'(name|arch) = "(\w+)"', text))
    assert attributes == {"name": "chain", "arch": "sm_90a"}
    assert "operand_layouts = [dense<0>" in text
    assert "has_side_effect" not in text


def test_layouts_are_pinned_row_major():
    spec = ArraySpec((4, 250), np.dtype(np.float32))
    launch = Launch(Scale(), (8, 1, 1), (Operand(0), Result(0), COUNT, 1.0))
    program = Program("matrix", (launch,), (spec,), (spec,))
    array = jnp.zeros(spec.shape)
    text = lower(lambda x: call_program(program, x, target=H200)[0], array).as_text()
    assert "operand_layouts = [dense<[1, 0]>" in text
    assert "result_layouts = [dense<[1, 0]>" in text


@pytest.mark.parametrize("has_side_effect", [False, True])
def test_only_side_effects_survive_unused_results(x, has_side_effect):
    def unused(x):
        call_program(scale_program(COUNT, 2.0), x, target=H200, has_side_effect=has_side_effect)
        return x

    text = lower(unused, x).as_text()
    assert ("@k3jax_launch" in text) == has_side_effect
    assert ("has_side_effect = true" in text) == has_side_effect


def test_equal_programs_reuse_the_trace(x):
    traces = []

    @jax.jit
    def traced(x):
        traces.append(x.shape)
        return chosen(x)

    for _ in range(3):
        traced(x)
    assert traces == [(COUNT,)]
    assert scale_program(COUNT, 2.0) == scale_program(COUNT, 2.0)
    assert hash(scale_program(COUNT, 2.0)) == hash(scale_program(COUNT, 2.0))


def test_token_counts_share_one_kernel(x, monkeypatch, tmp_path):
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_compile, "counts", kernel_compile.CompileCounts())
    for count in range(1, 40):
        lower(scale, x[:count])
    assert kernel_compile.counts.compiled == 1, kernel_compile.counts.reasons()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_lowers_for_cuda_and_runs_on_cpu(axis_type, check_vma):
    over = mesh("tp", axis_type=axis_type)
    function = jax.shard_map(
        chosen, mesh=over, in_specs=P("tp"), out_specs=P("tp"), check_vma=check_vma
    )
    text = lower(function, sharded(8 * COUNT, over)).as_text()
    assert text.count("@k3jax_launch") == 1
    values = np.random.default_rng().standard_normal(8 * COUNT).astype(np.float32)
    placed = jax.device_put(values, NamedSharding(over, P("tp")))
    np.testing.assert_array_equal(jax.jit(function)(placed), 2.0 * values)


def test_result_varies_over_the_axes_of_every_operand():
    over = mesh("dp", "tp")
    spec = ArraySpec((COUNT,), np.dtype(np.float32))
    launch = Launch(Scale(), (8, 1, 1), (Operand(1), Result(0), COUNT, 1.0))
    program = Program("pair", (launch,), (spec, spec), (spec,))
    seen = []

    def local(a, b):
        y = call_program(program, a, b, target=H200)[0]
        seen.append(jax.typeof(y).manual_axis_type.varying)
        return y

    both = jax.shard_map(local, mesh=over, in_specs=(P("tp"), P("dp")), out_specs=P(("dp", "tp")))
    jax.jit(both).trace(sharded(4 * COUNT, over), sharded(2 * COUNT, over, "dp"))
    assert seen[0] == {"dp", "tp"}


def test_nested_shard_maps_that_are_manual_together_are_accepted():
    over = mesh("dp", "tp")
    inner = jax.shard_map(chosen, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"})
    outer = jax.shard_map(inner, mesh=over, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    x = sharded(8 * COUNT, over, ("dp", "tp"))
    assert lower(outer, x).as_text().count("@k3jax_launch") == 1


def test_runs_inside_scan_and_remat_with_side_effects(x):
    exchange = platform_choice(
        lambda x: call_program(scale_program(COUNT, 2.0), x, target=H200, has_side_effect=True)[0],
        lambda x: 2.0 * x,
    )

    @jax.checkpoint
    def step(x, _):
        return exchange(x), None

    def steps(x):
        return jax.lax.scan(step, x, length=5)[0]

    text = lower(steps, x).as_text()
    assert text.count("@k3jax_launch") == 1
    assert "has_side_effect = true" in text
    np.testing.assert_array_equal(jax.jit(steps)(x), 32.0 * np.asarray(x))


def test_empty_results_need_no_kernel():
    empty = ArraySpec((0, 4), np.dtype(np.float32))
    launch = Launch(Scale(), (1, 1, 1), (Operand(0), Result(0), 0, 1.0))
    program = Program("empty", (launch,), (empty,), (empty,))
    array = jnp.zeros((0, 4))
    assert call_program(program, array, target=H200)[0].shape == (0, 4)
    assert (
        "k3jax_launch"
        not in lower(lambda x: call_program(program, x, target=H200)[0], array).as_text()
    )


def test_sharded_operands_outside_shard_map_are_refused():
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        over = mesh("tp", axis_type=axis_type)
        with pytest.raises(NotImplementedError, match=r"call it inside jax.shard_map, manual over"):
            lower(scale, sharded(8 * COUNT, over))


def test_partially_manual_shard_map_is_refused():
    over = mesh("dp", "tp")
    partial = jax.shard_map(
        scale, mesh=over, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"}
    )
    with pytest.raises(NotImplementedError, match=r"automatic partitioning \(\{'dp': 2\}\)"):
        lower(partial, sharded(4 * COUNT, over))


def test_vmap_is_refused_with_the_remedy(x):
    with pytest.raises(NotImplementedError, match="fold the mapped axis into the tokens"):
        jax.vmap(scale)(jnp.stack([x, x]))
    with pytest.raises(NotImplementedError, match=r"scale: jax.vmap cannot add an axis"):
        jax.jit(jax.vmap(chosen)).trace(jnp.stack([x, x]))


def test_grad_is_refused_with_the_remedy(x):
    with pytest.raises(NotImplementedError, match="use the op's reference implementation"):
        jax.grad(lambda x: scale(x).sum())(x)
    with pytest.raises(NotImplementedError, match="scale: the kernel has no derivative"):
        jax.jit(jax.grad(lambda x: chosen(x).sum())).trace(x)


def test_cpu_target_and_cpu_lowering_are_refused(x):
    program = scale_program(COUNT, 2.0)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, got target 'cpu'"):
        call_program(program, x, target=Target.named("cpu"))
    with pytest.raises(NotImplementedError, match=r"runs on CUDA only.*platform_choice"):
        call_program(program, x, target=H200)


def test_wrong_operands_are_refused(x):
    program = scale_program(COUNT, 2.0)
    for wrong in ((x[:10],), (x.astype(jnp.int32),), (x.reshape(10, 100),), (x, x), ()):
        with pytest.raises(TypeError, match=r"scale: got operands .* wanted"):
            call_program(program, *wrong, target=H200)


def test_uncarried_dtypes_are_refused():
    spec = ArraySpec((8,), np.dtype(jnp.float4_e2m1fn))
    launch = Launch(Scale(), (1, 1, 1), (Operand(0), Result(0), 8, 1.0))
    program = Program("packed", (launch,), (spec,), (spec,))
    with pytest.raises(TypeError, match=r"float4_e2m1fn cannot cross.*packed FP4 is uint8"):
        call_program(program, jnp.zeros(8, jnp.float4_e2m1fn), target=H200)


def test_missing_library_is_named_when_lowering(x, monkeypatch, tmp_path):
    import k3jax.runtime
    from k3jax.runtime import ffi, library

    monkeypatch.setattr(k3jax.runtime, "__path__", [str(tmp_path)])
    library.load_library.cache_clear()
    ffi.register.cache_clear()
    with pytest.raises(FileNotFoundError, match="build it with `pip install"):
        lower(scale, x)


def test_targets_differ_only_by_facts():
    assert Target.named("b200").arch == "sm_100a"
    assert Target.current() == Target.named("cpu")
    assert dataclasses.replace(H200, source="other") == H200
    with pytest.raises(ValueError, match="target='tpu' is not known; choose one of"):
        Target.named("tpu")
