"""The command line: what it computes, prints and refuses."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from k3jax.cli import main
from k3jax.config import MoEConfig
from k3jax.plan import plan_layer
from tests import oracle
from tests.checkpoints import PREFIX, layer_of, read_checkpoint, stacked
from tests.support import TINY, WHOLE_LAYER

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "tests" / "data" / "kimi_k3_config.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    assert main(["make-checkpoint", str(folder), "--tiny", "--seed", "5"]) == 0
    return folder


@pytest.fixture
def tokens(tmp_path):
    x = np.random.default_rng(1).standard_normal((7, TINY.hidden_size)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return x


@pytest.fixture
def cli(tmp_path, capsys, monkeypatch):
    """Runs a command in a fresh folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = exit_.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def refused(cli):
    """The one line that a command ends with on stderr."""

    def call(*words):
        status, _, err = cli(*words)
        assert status == 2
        assert "Traceback" not in err
        (line,) = err.splitlines()
        return line

    return call


def expected(checkpoint, layer, x):
    """The layer by the oracle, from the files as the format's own library reads them."""
    tensors = layer_of(read_checkpoint(checkpoint), layer)
    x = x.astype(ml_dtypes.bfloat16)
    return oracle.layer(stacked(tensors, TINY.num_experts), x, TINY)


# run


@pytest.mark.parametrize(
    ("layer", "tp", "options"),
    [
        (1, 1, []),
        (2, 8, []),
        (1, 8, ["--tail", "column_parallel", "--experts", "reference"]),
        (2, 2, ["--tail", "unfused"]),
    ],
)
def test_run(cli, checkpoint, tokens, layer, tp, options):
    words = ["--layer", layer, "--input", "x.npy", "--output", "y", "--tp", tp, *options]
    status, out, err = cli("run", checkpoint, *words)
    assert (status, err) == (0, "")
    y = np.load("y")
    assert y.dtype == np.float32
    assert y.shape == tokens.shape
    assert oracle.relative_error(y, expected(checkpoint, layer, tokens)) < WHOLE_LAYER
    np.testing.assert_array_equal(y, y.astype(ml_dtypes.bfloat16).astype(np.float32))
    lines = out.splitlines()
    assert lines[0] == f"cpu, tp={tp}, replicated output"
    assert lines[-1] == f"wrote y: float32 [7, {TINY.hidden_size}]"
    for tier in options[1::2]:
        assert re.search(rf"^7 .*\b{tier} +asked for", out, re.MULTILINE)
    assert sorted(path.name for path in Path().iterdir()) == ["x.npy", "y"]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_run_takes_any_float(cli, checkpoint, tokens, dtype):
    x = tokens.astype(dtype)
    np.save("x.npy", x)
    assert cli("run", checkpoint, "--layer", 1, "--input", "x.npy", "--output", "y.npy")[0] == 0
    assert oracle.relative_error(np.load("y.npy"), expected(checkpoint, 1, x)) < WHOLE_LAYER


def test_run_on_no_tokens(cli, checkpoint):
    np.save("x.npy", np.zeros((0, TINY.hidden_size), np.float32))
    words = ["--layer", 1, "--input", "x.npy", "--output", "y.npy", "--tp", 4]
    assert cli("run", checkpoint, *words)[0] == 0
    assert np.load("y.npy").shape == (0, TINY.hidden_size)


def test_run_on_a_single_shard(cli, checkpoint, tokens):
    arrays = {n: a for n, a in read_checkpoint(checkpoint).items() if PREFIX.format(2) in n}
    safetensors.numpy.save_file(arrays, "layer.safetensors")
    words = ["--layer", 2, "--input", "x.npy", "--output", "y.npy"]
    assert cli("run", "layer.safetensors", *words, "--config", checkpoint)[0] == 0
    assert oracle.relative_error(np.load("y.npy"), expected(checkpoint, 2, tokens)) < WHOLE_LAYER
    Path("config.json").write_bytes((checkpoint / "config.json").read_bytes())
    assert cli("run", "layer.safetensors", *words, "--force")[0] == 0


def test_run_makes_its_own_virtual_devices(checkpoint, tokens, tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    words = ["--layer", "1", "--input", "x.npy", "--output", "y.npy", "--tp", "16"]
    done = subprocess.run(
        [sys.executable, "-m", "k3jax", "run", str(checkpoint), *words],
        cwd=tmp_path,
        env={**env, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu, tp=16, replicated output\n")
    got = np.load(tmp_path / "y.npy")
    assert oracle.relative_error(got, expected(checkpoint, 1, tokens)) < WHOLE_LAYER


def test_run_keeps_an_existing_output(cli, refused, checkpoint, tokens):
    Path("y.npy").write_text("mine")
    words = ["run", checkpoint, "--layer", 1, "--input", "x.npy", "--output", "y.npy"]
    assert refused(*words) == "k3jax run: --output y.npy exists; pass --force to write over it"
    assert Path("y.npy").read_text() == "mine"
    assert cli(*words, "--force")[0] == 0
    assert np.load("y.npy").shape == tokens.shape


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((2, 128), np.float32), "has shape [2, 128]; want [T, 256]"),
        (np.zeros(256, np.float32), "has shape [256]; want [T, 256]"),
        (np.zeros((1, 2, 256), np.float32), "has shape [1, 2, 256]; want [T, 256]"),
        (np.zeros((2, 256), np.int32), "holds int32; want floats"),
        (np.zeros((2, 256), np.complex64), "holds complex64; want floats"),
        (np.zeros((2, 256), ml_dtypes.bfloat16), "(save bfloat16 as float32)"),
    ],
)
def test_run_refuses_inputs(refused, checkpoint, content, message):
    np.save("x.npy", content)
    line = refused("run", checkpoint, "--layer", 1, "--input", "x.npy", "--output", "y.npy")
    assert line.startswith("k3jax run: --input x.npy ")
    assert message in line
    assert not Path("y.npy").exists()


def test_run_refuses_files_that_are_not_arrays(refused, checkpoint):
    words = ["run", checkpoint, "--layer", 1, "--output", "y.npy", "--input"]
    np.savez("x.npz", np.zeros(3))
    assert "--input x.npz is not a .npy file" in refused(*words, "x.npz")
    Path("x.npy").write_text("no array")
    assert "--input x.npy is not a .npy file" in refused(*words, "x.npy")
    np.save("x.npy", np.array([{}]), allow_pickle=True)
    assert "--input x.npy is not a .npy file" in refused(*words, "x.npy")
    Path("x.npy").write_bytes(b"")
    assert "--input x.npy is not a .npy file" in refused(*words, "x.npy")
    assert "No such file or directory: 'absent.npy'" in refused(*words, "absent.npy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", 0], "layer=0 is dense (its tensors are mlp.*); the MoE layers are 1-2"),
        (["--layer", 9], "layer=9 is not in a model of 3; the MoE layers are 1-2"),
        (["--tp", 3], "tp=3 does not divide this config"),
        (["--tp", 0], "tp=0 does not divide this config"),
        (["--tail", "fastest"], "tail='fastest' is not a tier; choose one of ['unfused',"),
        (["--tail", "column_parallel"], "cannot run here: tp is 1: there is nothing to reduce"),
        (["--experts", "fastest"], "experts='fastest' is not a tier"),
        (["--output", "no/y.npy"], "--output no/y.npy: its folder is not there"),
        (["--config", "absent.json"], "No such file or directory: 'absent.json'"),
        (["--layer", "one"], "argument --layer: invalid int value: 'one'"),
    ],
)
def test_run_refuses(refused, checkpoint, tokens, words, message):
    base = ["--layer", 1, "--input", "x.npy", "--output", "y.npy"]
    assert message in refused("run", checkpoint, *base, *words)
    assert not Path("y.npy").exists()


def test_run_needs_devices(refused, checkpoint, tokens, monkeypatch):
    words = ["run", checkpoint, "--layer", 1, "--input", "x.npy", "--output", "y.npy", "--tp", 8]
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    line = refused(*words)
    assert "tp=8 needs 8 devices, there are 2 (cpu); use a smaller tp, or JAX_PLATFORMS=cpu" in line
    gpu = type("Device", (), {"platform": "gpu"})()
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    line = refused(*words)
    assert "there are 1 (gpu); use a smaller tp, or JAX_PLATFORMS=cpu" in line


def test_run_without_checkpoint(refused, tokens):
    words = ["--layer", 1, "--input", "x.npy", "--output", "y.npy"]
    assert "No such file or directory" in refused("run", "absent", *words)
    Path("empty").mkdir()
    (Path("empty") / "config.json").write_bytes(PUBLISHED.read_bytes())
    np.save("x.npy", np.zeros((1, 7168), np.float32))
    assert "checkpoint empty has neither model.safetensors.index.json" in refused(
        "run", "empty", *words
    )


def test_run_with_nan_scales(cli, refused, checkpoint, tokens):
    arrays = {n: a for n, a in read_checkpoint(checkpoint).items() if PREFIX.format(1) in n}
    tensors = layer_of(arrays, 1)
    bias = tensors["gate.e_score_correction_bias"]
    logits = tokens @ tensors["gate.weight"].astype(np.float32).T
    ids, _ = oracle.route(logits, bias, TINY.experts_per_token)
    expert = ids[2, 0]
    name = PREFIX.format(1) + f"experts.{expert}.w1.weight_scale"
    arrays[name] = np.full_like(arrays[name], 255)
    safetensors.numpy.save_file(arrays, "nan.safetensors")
    words = ["run", "nan.safetensors", "--config", checkpoint]
    words += ["--layer", 1, "--input", "x.npy", "--output", "y.npy"]
    line = refused(*words)
    assert f"scale byte 255 (NaN) in experts.{expert}.w1.weight_scale; nothing was" in line
    assert not Path("y.npy").exists()
    assert cli(*words, "--allow-nan-scales")[0] == 0
    chosen = (ids == expert).any(axis=1)
    assert 0 < chosen.sum() < 7
    nan = np.isnan(np.load("y.npy"))
    np.testing.assert_array_equal(nan, np.repeat(chosen[:, None], TINY.hidden_size, axis=1))


def test_traceback_on_request(cli, checkpoint, tokens):
    words = ["run", checkpoint, "--layer", 0, "--input", "x.npy", "--output", "y.npy"]
    with pytest.raises(ValueError, match="layer=0 is dense"):
        cli("--traceback", *words)


# plan


def test_plan_table(cli):
    tokens = [1, 8, 64, 128, 256, 257, 4096]
    words = ["--tokens", ",".join(map(str, tokens)), "--tp", 8, "--target", "b200"]
    status, out, err = cli("plan", *words)
    assert (status, err) == (0, "")
    title, head, *rows = out.splitlines()
    assert title == "b200, tp=8, replicated output"
    assert head.split()[0] == "tokens"
    assert {"experts", "tail", "because"} <= set(head.split())
    for row, count in zip(rows, tokens, strict=False):
        plan = plan_layer(MoEConfig.kimi_k3(), count, tp=8, target="b200")
        assert row.split()[0] == str(count)
        for choice in (plan.experts, plan.tail):
            assert re.search(rf"  {choice.tier} +{re.escape(choice.reason)}", row)
    below = "\n".join(rows[len(tokens) :])
    assert below.startswith("declined:\n")
    for count in tokens:
        plan = plan_layer(MoEConfig.kimi_k3(), count, tp=8, target="b200")
        for part in ("experts", "tail"):
            for tier, reason in getattr(plan, part).declined:
                assert re.search(rf"  {part}={tier}.*: {re.escape(reason)}", below)


def test_plan_names_the_batches_that_a_tier_declined(cli, monkeypatch):
    from k3jax import plan as planning

    plan_for = functools.partial(plan_layer, MoEConfig.kimi_k3(), target="cpu")
    plans = {1: plan_for(1, tp=2), 7: plan_for(7, tp=2, output="scattered")}
    monkeypatch.setattr(planning, "plan_layer", lambda config, tokens, **options: plans[tokens])
    _, out, _ = cli("plan", "--tokens", "1,7")
    assert "  tail=column_parallel at 7 tokens: the output is scattered" in out.splitlines()


def test_plan_json(cli, checkpoint):
    words = ["--tokens", "0,300", "--tp", 4, "--target", "h200", "--output", "scattered", "--json"]
    status, out, _ = cli("plan", *words, "--config", checkpoint)
    assert status == 0
    found = json.loads(out)
    assert [entry["num_tokens"] for entry in found] == [0, 300]
    for entry in found:
        plan = plan_layer(TINY, entry["num_tokens"], tp=4, target="h200", output="scattered")
        assert (entry["tp"], entry["target"], entry["output"]) == (4, "h200", "scattered")
        for part in ("experts", "tail"):
            choice = getattr(plan, part)
            assert entry[part]["tier"] == choice.tier
            assert entry[part]["reason"] == choice.reason
            assert entry[part]["declined"] == dict(choice.declined)


def test_plan_options(cli):
    words = ["plan", "--tokens", 50, "--tp", 4, "--target", "cpu", "--json"]
    tail = [json.loads(cli(*words, *more)[1])[0]["tail"]["tier"] for more in (
        [], ["--overlap-limit", 49], ["--overlap-limit", 50], ["--overlap-limit", 0],
        ["--output", "scattered"],
    )]  # fmt: skip
    assert tail == [
        "allreduce_overlap",
        "column_parallel",
        "allreduce_overlap",
        "column_parallel",
        "unfused",
    ]
    here = json.loads(cli("plan", "--tokens", 1, "--json")[1])[0]
    assert (here["target"], here["tp"]) == ("cpu", 1)
    assert cli(*words, "--config", PUBLISHED) == cli(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1,x"], "'1,x' is not a list of whole numbers such as 1,8,64"),
        (["--tokens", ""], "'' is not a list of whole numbers"),
        (["--tokens=-1"], "num_tokens=-1 must be 0 or more"),
        (["--tokens", "1", "--tp", "5"], "tp=5 does not divide this config"),
        (["--tokens", "1", "--target", "abacus"], "target='abacus' is not known; choose one of"),
        (["--tokens", "1", "--output", "split"], "argument --output: invalid choice: 'split'"),
        (["--tokens", "1", "--config", "absent"], "No such file or directory"),
        ([], "the following arguments are required: --tokens"),
    ],
)
def test_plan_refuses(refused, words, message):
    assert message in refused("plan", *words)


# make-checkpoint


def test_make_checkpoint(cli, checkpoint):
    assert cli("make-checkpoint", "all", "--tiny", "--seed", 5) == (
        0,
        "wrote all: layers 1, 2\n",
        "",
    )
    for file in checkpoint.iterdir():
        assert (Path("all") / file.name).read_bytes() == file.read_bytes()
    words = ["make-checkpoint", "two", "--tiny", "--seed", 5, "--layers", 2]
    assert cli(*words, "--shard-bytes", 1 << 30)[0] == 0
    assert len(list(Path("two").glob("*.safetensors"))) == 1
    two, all_ = read_checkpoint(Path("two")), layer_of(read_checkpoint(checkpoint), 2)
    assert layer_of(two, 2).keys() == all_.keys()
    assert len(two) == len(all_)
    assert all(a.tobytes() == all_[n].tobytes() for n, a in layer_of(two, 2).items())


def test_make_checkpoint_of_the_published_shape(cli, monkeypatch):
    """Sixteen gigabytes are not written here: what would be is."""
    import k3jax.checkpoint

    calls = []
    monkeypatch.setattr(
        k3jax.checkpoint, "write_checkpoint", lambda *args, **options: calls.append((args, options))
    )
    assert cli("make-checkpoint", "big", "--layer-shape", "kimi_k3")[0] == 0
    assert cli("make-checkpoint", "big", "--layer-shape", "kimi_k3", "--layers", "3,92")[0] == 0
    (first, options), (second, _) = calls
    assert first[:2] == ("big", MoEConfig.kimi_k3())
    assert [list(args[2]) for args in (first, second)] == [[1], [3, 92]]
    assert options == {"seed": 0, "shard_bytes": 1 << 32}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --tiny --layer-shape is required"),
        (["--tiny", "--layer-shape", "kimi_k3"], "not allowed with argument --tiny"),
        (["--layer-shape", "kimi_k2"], "invalid choice: 'kimi_k2'"),
        (["--tiny", "--layers", "0"], "layers=[0] must be among the MoE layers of the config, 1-2"),
        (["--tiny", "--layers", "a"], "'a' is not a list of whole numbers"),
        (["--tiny", "--seed", "-3"], "seed=-3 must be at least 0"),
        (["--tiny", "--shard-bytes", "0"], "shard_bytes=0 must be at least 1"),
    ],
)
def test_make_checkpoint_refuses(refused, words, message):
    assert message in refused("make-checkpoint", "new", *words)
    assert not Path("new").exists()


def test_make_checkpoint_keeps_what_is_there(refused, checkpoint):
    line = refused("make-checkpoint", checkpoint, "--tiny")
    assert line.endswith("is not an empty folder; choose another")


# the command itself


def test_help_names_every_verb(cli):
    status, out, _ = cli("--help")
    assert status == 0
    for verb, does in (
        ("plan", "Print which implementation"),
        ("run", "Run one layer"),
        ("make-checkpoint", "Write a synthetic checkpoint"),
    ):
        assert re.search(rf"^ +{verb}\s+{does}", out, re.MULTILINE)
        status, text, _ = cli(verb, "--help")
        assert status == 0
        assert does in text


def test_no_verb_and_unknown_verb(refused):
    assert "the following arguments are required: VERB" in refused()
    assert "invalid choice: 'fly'" in refused("fly")
