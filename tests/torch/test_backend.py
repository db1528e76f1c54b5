"""Models compiled by `backend="neuron_store"` against eager, with the real compiler."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from neuron_store.errors import (  # noqa: E402
    CacheMiss,
    CompileError,
    Unsupported,
    UnsupportedOperator,
)
from neuron_store.opening import open_store  # noqa: E402
from tests.torch.models import Block, Chooser, Llama, mlp  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def compiled(model, **options):
    return torch.compile(model, backend="neuron_store", options=options or None)


def entries(cache):
    return (
        sorted(p.name for p in cache.iterdir() if not p.name.startswith("."))
        if (cache.is_dir())
        else []
    )


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def record(cache, key):
    return json.loads((cache / key / ".neuron_store.json").read_text())


@torch.no_grad()
def test_an_mlp_equals_eager_and_its_artifact_says_what_it_is(cache):
    model, x = mlp(), torch.randn(3, 16)
    close(compiled(model)(x), model(x))
    (key,) = entries(cache)
    found = record(cache, key)
    assert found["compiler"] == "iree"
    assert found["executable"] == f"graph_{key}.vmfb"
    assert {"graph.hlo", "graph.mlir", f"graph_{key}.vmfb"} <= {n["name"] for n in found["files"]}
    assert found["components"]["framework"] == f"torch {torch.__version__}"
    assert "float32[3,16](16,1)@cpu" in found["components"]["inputs"]
    assert str(cache) not in json.dumps(found)


@torch.no_grad()
def test_weights_are_inputs_and_another_model_of_the_shape_shares_the_artifact(cache):
    x = torch.randn(3, 16)
    for _ in range(2):
        torch._dynamo.reset()
        model = mlp()
        close(compiled(model)(x), model(x))
    assert len(entries(cache)) == 1
    for parameter in model.parameters():
        parameter.mul_(2)
    close(compiled(model)(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_transformer_block_equals_eager(cache, dtype):
    model, x = Block().to(dtype), torch.randn(2, 6, 32).to(dtype)
    # Eager rounds to half precision after each operator; a fused program rounds less often.
    close(compiled(model)(x), model(x), 1e-5 if dtype == torch.float32 else 4e-2)


CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(6)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


# In inference torch calls an operator that does the whole layer at once.
@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "masks"),
    [
        ({}, {}),
        ({"norm_first": True, "activation": "gelu"}, {"src_key_padding_mask": PADDING}),
        ({}, {"src_mask": CAUSAL}),
        ({}, {"src_mask": CAUSAL.isinf(), "src_key_padding_mask": PADDING}),
    ],
)
def test_torchs_own_encoder_layer_equals_eager(cache, options, masks):
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options).eval()
    x = torch.randn(2, 6, 16)
    close(compiled(layer, fallback="error")(x, **masks), layer(x, **masks))
    assert len(entries(cache)) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False, "key_padding_mask": PADDING},
    ],
)
def test_torchs_own_attention_equals_eager(cache, options):
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 16)
    got, weights = compiled(attention, fallback="error")(x, x, x, **options)
    want, expected = attention(x, x, x, **options)
    close(got, want)
    if expected is None:
        assert weights is None
    else:
        close(weights, expected)
    assert len(entries(cache)) == 1


@torch.no_grad()
def test_a_llama_equals_eager_in_prefill_and_decode_and_writes_its_cache(cache):
    model = Llama()
    fast = compiled(model)
    ours, theirs = model.new_cache(), model.new_cache()
    tokens = torch.randint(0, 128, (1, 6))
    close(fast(tokens, torch.arange(6), ours), model(tokens, torch.arange(6), theirs))
    for position in (6, 7, 8):
        token, where = torch.randint(0, 128, (1, 1)), torch.tensor([position])
        close(fast(token, where, ours), model(token, where, theirs))
    close(ours, theirs)
    assert ours[0][:, :, :, 8].abs().sum() > 0
    assert len(entries(cache)) == 2  # prefill, decode


@torch.no_grad()
def test_a_dynamic_batch_has_one_graph_and_an_artifact_for_each_size(cache):
    model = mlp()
    fast = torch.compile(model, backend="neuron_store", dynamic=True)
    for batch in (2, 5, 2, 7, 5):
        x = torch.randn(batch, 16)
        close(fast(x), model(x))
    found = [record(cache, key)["components"] for key in entries(cache)]
    assert len(found) == 3
    assert len({c["graph"] for c in found}) == 1
    assert all(c["symbols"][0].startswith("d0:[2,") for c in found)
    assert {c["sizes"][c["inputs"].index("float32[d0,16](16,1)@cpu")][0] for c in found} == {
        2,
        5,
        7,
    }


@torch.no_grad()
def test_sizes_that_a_graph_computes_and_returns_are_numbers(cache):
    def function(x):
        return x.reshape(x.shape[0] * 2, -1), x.shape[0] * 3, x[: x.shape[0] // 2]

    fast = torch.compile(function, backend="neuron_store", dynamic=True)
    for batch in (4, 6):
        x = torch.randn(batch, 8)
        got, want = fast(x), function(x)
        assert got[1] == want[1]
        close((got[0], got[2]), (want[0], want[2]))


@torch.no_grad()
def test_both_branches_of_a_cond_equal_eager(cache):
    model = Chooser()
    fast = compiled(model)
    for x in (torch.ones(3, 8), -torch.ones(3, 8)):
        close(fast(x), model(x))
    assert len(entries(cache)) == 1


def test_training_gives_the_gradients_of_eager(cache):
    for model, x in ((mlp(), torch.randn(3, 16)), (Block(), torch.randn(2, 6, 32))):
        want = model(x)
        want.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        got = compiled(model)(x)
        got.square().sum().backward()
        close(got, want)
        close([p.grad for p in model.parameters()], gradients, 1e-4)
    assert len(entries(cache)) == 4  # a forward and a backward each


@torch.no_grad()
def test_types_views_strides_and_equal_results_are_those_of_eager(cache):
    def function(x, i, b):
        a = x + 1
        return (
            a.t(), x.t(), a.view(-1)[1:], x + 1, i + 2**40, b.logical_not(), x, 7, None,
            i.to(torch.float64) / 3, x[:, ::2], torch.tensor([1.5, 2.5]) + x[0, :2],
        )  # fmt: skip

    inputs = (torch.randn(3, 4), torch.arange(3), torch.tensor([True, False]))
    got, want = compiled(function)(*inputs), function(*inputs)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
            close(g, w)
        else:
            assert g == w
    assert got[6] is inputs[0]
    got[3].zero_()  # equal to the base of got[0], and not the same memory
    close(got[0], want[0])


@torch.no_grad()
def test_inputs_of_any_layout_and_alignment_are_read_rightly(cache):
    fast = compiled(lambda x, y: x * 2 + y)
    base, other = torch.randn(33), torch.randn(8, 4)
    x, y = base[1:].view(4, 8), other.t()
    close(fast(x, y), x * 2 + y)
    close(base, base.clone())


@torch.no_grad()
def test_in_place_changes_reach_the_caller(cache):
    def function(x, y):
        x.add_(1)
        y[:, 1] = 5
        return x * y

    a, b = torch.randn(3, 4), torch.randn(3, 4)
    c, d = a.clone(), b.clone()
    close(compiled(function)(a, b), function(c, d))
    close((a, b), (c, d))


# -- a hit -----------------------------------------------------------------------------------------

WARM = """
import sys, json
sys.path.insert(0, sys.argv[1])
import torch
from tests.torch.models import Llama
torch.manual_seed(0)
model = Llama()
fast = torch.compile(model, backend="neuron_store")
with torch.no_grad():
    cache = model.new_cache()
    out = fast(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), cache)
    want = model(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), model.new_cache())
print(json.dumps({
    "wrong": (out - want).abs().max().item(),
    "imported": [m for m in ("jax", "jaxlib", "iree.compiler", "neuron_store.lowering.export")
                 if m in sys.modules],
}))
"""


def run(program, **env):
    done = subprocess.run(
        [sys.executable, "-c", program, os.getcwd()],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_hit_in_another_process_imports_neither_jax_nor_a_compiler(cache):
    cold = run(WARM)
    assert "jax" in cold["imported"]
    assert len(entries(cache)) == 1
    warm = run(WARM, VLLM_NEURON_DISABLE_WARMUP_COMPILE="1")
    assert warm["imported"] == []
    assert warm["wrong"] < 1e-5
    assert len(entries(cache)) == 1


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX says so of every fork after it was imported
@torch.no_grad()
def test_a_child_of_fork_runs_what_its_parent_loaded(cache):
    model, x = mlp(), torch.randn(3, 16)
    fast, want = compiled(model), model(x)
    close(fast(x), want)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        right = b"0"
        try:
            torch.set_num_threads(1)
            right = b"1" if torch.allclose(fast(x), want, atol=1e-5) else b"0"
        finally:
            os.write(write, right)
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"1"
    os.waitpid(child, 0)
    os.close(read)


@torch.no_grad()
def test_threads_share_one_program(cache):
    model, x = mlp(), torch.randn(3, 16)
    fast, want = compiled(model), model(x)
    fast(x)
    wrong = []

    def many():
        with torch.no_grad():
            wrong.extend(1 for _ in range(50) if not torch.allclose(fast(x), want, atol=1e-5))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- options, refusals and errors ----------------------------------------------------------------


@torch.no_grad()
def test_a_store_may_be_given_and_so_may_urls(cache, tmp_path):
    x = torch.randn(3, 16)
    with open_store(str(tmp_path / "shared"), local=tmp_path / "mine") as store:
        compiled(mlp(), store=store)(x)
        (key,) = entries(tmp_path / "mine")
        store.promote(key)
    assert entries(cache) == []
    torch._dynamo.reset()
    os.environ["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] = "1"
    try:
        compiled(mlp(), store=[str(tmp_path / "shared")])(x)
    finally:
        del os.environ["VLLM_NEURON_DISABLE_WARMUP_COMPILE"]
    assert entries(cache) == [key]  # fetched, since compiling was forbidden


@torch.no_grad()
def test_flags_and_extra_components_make_other_artifacts(cache):
    x = torch.randn(3, 16)
    for options in (
        {},
        {"compiler_flags": ["--iree-opt-level=O2"]},
        {"compiler_flags": "--iree-opt-level=O2"},
        {"extra": {"kernels": "1"}},
        {"extra": {"kernels": "2"}},
    ):
        torch._dynamo.reset()
        compiled(mlp(), **options)(x)
    assert len(entries(cache)) == 4


def odd(x):
    return torch.linalg.solve(x, torch.ones_like(x)) + 1


@torch.no_grad()
def test_a_missing_operator_runs_eagerly_with_one_warning_that_names_it(cache, caplog):
    x = torch.eye(3) * 2
    with caplog.at_level(logging.WARNING, logger="neuron_store"):
        for _ in range(2):
            torch._dynamo.reset()
            close(compiled(odd)(x), odd(x))
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert "aten._linalg_solve_ex" in warnings[0]
    assert entries(cache) == []


@torch.no_grad()
def test_a_missing_operator_is_an_error_when_that_was_asked_for(cache):
    with pytest.raises(UnsupportedOperator, match="_linalg_solve_ex"):
        compiled(odd, fallback="error")(torch.eye(3))


def strange(x):
    return torch.linalg.vector_norm(x, 3)


@torch.no_grad()
def test_a_form_of_an_operator_is_refused_in_the_same_two_ways(cache, caplog):
    x = torch.randn(3)
    with caplog.at_level(logging.WARNING, logger="neuron_store.torch"):
        fast = compiled(strange)
        close(fast(x), strange(x))
        close(fast(x), strange(x))
    assert [r.getMessage() for r in caplog.records if "order 3" in r.getMessage()] != []
    torch._dynamo.reset()
    with pytest.raises(UnsupportedOperator, match="order 3"):
        compiled(strange, fallback="error")(x)
    assert entries(cache) == []


@torch.no_grad()
def test_what_cannot_be_keyed_is_compiled_without_the_cache_with_one_warning(
    cache, caplog, monkeypatch
):
    # A graph whose constant is quantised, say, lowers well; here the key alone refuses.
    from neuron_store import torch_backend
    from neuron_store.errors import Unkeyable

    def refuse(*_, **__):
        raise Unkeyable("a lambda", "its code is not in the graph")

    monkeypatch.setattr(torch_backend, "graph_components", refuse)
    model, x = mlp(), torch.randn(3, 16)
    with caplog.at_level(logging.WARNING, logger="neuron_store.torch"):
        for _ in range(2):
            torch._dynamo.reset()
            close(compiled(model)(x), model(x))
    assert entries(cache) == []
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "without the cache" in warning
    assert "a lambda" in warning


@torch.no_grad()
def test_errors_reach_the_caller_as_they_are_and_the_next_call_tries_afresh(cache, monkeypatch):
    model, x = mlp(), torch.randn(3, 16)
    fast = compiled(model)
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    with pytest.raises(CacheMiss, match="VLLM_NEURON_DISABLE_WARMUP_COMPILE"):
        fast(x)
    monkeypatch.delenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE")
    close(fast(x), model(x))


@torch.no_grad()
def test_a_failing_compiler_is_an_error_not_a_fallback(cache):
    with pytest.raises(CompileError, match="iree-compile"):
        compiled(mlp(), compiler_flags=["--no-such-flag"])(torch.randn(3, 16))
    assert entries(cache) == []


@torch.no_grad()
def test_with_the_cache_disabled_it_runs_and_leaves_nothing(cache, monkeypatch):
    """Pitfall 37."""
    monkeypatch.setenv("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "1")
    model, x = mlp(), torch.randn(3, 16)
    close(compiled(model)(x), model(x))
    assert entries(cache) == []


@torch.no_grad()
def test_for_neuronx_cc_the_graph_is_hlo_and_the_entry_is_the_neuron_stacks_own(cache, monkeypatch):
    stubs = os.path.join(os.getcwd(), "tests", "stubs")
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    with pytest.raises(Unsupported, match="load"):  # there is no Neuron device here to run it
        compiled(mlp(), compiler="neuronx-cc", compiler_flags="--target trn2 -O1")(
            torch.randn(3, 16)
        )
    (key,) = entries(cache)
    files = {p.name for p in (cache / key).iterdir()}
    assert {"graph.hlo", f"graph_{key}.neff", ".artifact_metadata_v0.json",
            ".compilation_complete"} <= files  # fmt: skip
    metadata = json.loads((cache / key / ".artifact_metadata_v0.json").read_text())
    assert metadata["cache_key"] == key
    assert metadata["output_count"] == 1
    found = record(cache, key)["components"]
    assert found["target"] == "trn2"
    assert "--optlevel=1" in found["compiler_flags"]


@torch.no_grad()
def test_flags_of_the_environment_are_in_the_key_and_in_the_ledger(cache, tmp_path, monkeypatch):
    """Pitfall 42: also where the variable changes within a process."""
    stubs = os.path.join(os.getcwd(), "tests", "stubs")
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(tmp_path / "manifests"))
    for added in ("-O1", "-O3 --auto-cast=none"):
        monkeypatch.setenv("NEURON_CC_FLAGS", added)
        torch.compiler.reset()
        with pytest.raises(Unsupported, match="load"):
            compiled(mlp(), compiler="neuronx-cc", compiler_flags="--target trn2")(
                torch.randn(3, 16)
            )
    levels = [record(cache, key)["components"]["compiler_flags"] for key in entries(cache)]
    assert sorted("--optlevel=3" in level for level in levels) == [False, True]
    (ledger,) = (tmp_path / "manifests" / "ledger" / "nodev").glob("*.jsonl")
    told = [json.loads(line)["compiler_flags"] for line in ledger.read_text().splitlines()]
    assert told == ["--target trn2 -O1", "--target trn2 -O3 --auto-cast=none"]


def test_tensors_on_a_device_that_the_compiler_has_not_are_refused(cache):
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match="tensors on meta"):
        compiled(mlp().to("meta"), fallback="error")(torch.randn(3, 16, device="meta"))


@torch.no_grad()
def test_each_captured_graph_is_in_the_ledger_of_the_manifest(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(tmp_path / "manifests"))
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-3")
    monkeypatch.setenv("RANK", "2")
    compiled(mlp(), compiler_flags=["--iree-opt-level=O1"])(torch.randn(3, 16))
    (key,) = entries(cache)
    (ledger,) = (tmp_path / "manifests" / "ledger" / "dev0_3").glob("*.jsonl")
    (line,) = map(json.loads, ledger.read_text().splitlines())
    assert (line["key"], line["rank"]) == (key, 2)
    assert "3, 16" in line["input_shapes"]
    assert "--iree-opt-level=O1" in line["compiler_flags"]
