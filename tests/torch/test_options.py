"""What may be said in `torch.compile(..., options={...})`."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from neuron_store.errors import ConfigError  # noqa: E402
from neuron_store.fx_key import graph_components  # noqa: E402
from neuron_store.opening import open_store  # noqa: E402
from neuron_store.torch_backend import BackendOptions  # noqa: E402
from tests.torch.models import mlp  # noqa: E402

pytestmark = [pytest.mark.torch]

BAD = [
    ({"compilr": "iree"}, "unknown option 'compilr'; known: compiler, compiler_flags"),
    ({"compiler": "gcc"}, "option compiler: no compiler 'gcc'; known:"),
    ({"compiler": ""}, "option compiler: no compiler ''; known:"),
    ({"compiler": ["iree"]}, "option compiler: .* give the name of an adapter"),
    ({"compiler_flags": 5.5}, "option compiler_flags: .*float; give a list"),
    ({"compiler_flags": 5}, "option compiler_flags: .*int; give a list"),
    ({"compiler_flags": {"--k": "v"}}, "option compiler_flags: .*dict; give a list"),
    ({"compiler_flags": {"--k=v"}}, "option compiler_flags: .*set; give a list"),
    ({"compiler_flags": ["--k", None]}, "option compiler_flags: .*NoneType; flags are strings"),
    ({"compiler_flags": "'open"}, "option compiler_flags: .*balance the quotes"),
    ({"compiler_flags": ["--k=a\0b"]}, "option compiler_flags: .*NUL"),
    ({"compiler_flags": "--k=a\0b"}, "option compiler_flags: .*NUL"),
    ({"fallback": "perhaps"}, "option fallback: 'perhaps' is neither 'eager' nor 'error'"),
    ({"fallback": []}, r"option fallback: \[\] is neither"),
    ({"extra": "abc"}, "option extra: 'abc' .* give a mapping"),
    ({"extra": {1: 2}}, "option extra: extra component 1 is named by a int; use text"),
    ({"extra": {"kernels": object()}}, "option extra: extra component 'kernels' is a object"),
    ({"store": 5}, "option store: a value of type int is no store; give"),
    ({"store": [5]}, "option store: a value of type int is no tier; give"),
    ({"store": b"/tmp"}, "option store: a value of type bytes is no store"),
    ({"store": "cache"}, "option store: tier 'cache' is neither a URL nor an absolute path"),
    ({"store": Path("cache")}, "option store: tier 'cache' is neither"),
    ({"store": ["/tmp/a", ""]}, "option store: tier '' is neither"),
    ({"store": "ftp://host/x"}, "option store: no tier for scheme 'ftp'; known:"),
    ({"store": "s3://bucket/x?secret_key=1"}, "option store: .*looks like a credential"),
]


@pytest.mark.parametrize(
    ("options", "told"), BAD, ids=[str(o).partition(" object at ")[0] for o, _ in BAD]
)
def test_an_option_that_cannot_be_used_is_named_with_its_remedy(options, told):
    with pytest.raises(ConfigError, match=told):
        BackendOptions.parse(options)


def test_an_address_with_credentials_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        BackendOptions.parse({"store": ["s3://user:hunter2@bucket/x"]})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("options", "told"), [BAD[3], BAD[4], BAD[13], BAD[15], BAD[17], BAD[20]])
def test_it_is_raised_while_dynamo_compiles(cache, options, told):
    fast = torch.compile(mlp(), backend="neuron_store", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=told) as caught:
        fast(torch.randn(3, 16))
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_none_means_the_default():
    names = ("compiler", "compiler_flags", "store", "fallback", "extra")
    assert BackendOptions.parse(dict.fromkeys(names)) == BackendOptions.parse(None)


def test_a_key_refuses_a_component_whose_name_is_no_text():
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(ConfigError, match="named by a int"):
        graph_components(graph, compiler="iree", compiler_version="1", extra={1: 2})


@torch.no_grad()
def test_a_root_that_cannot_be_made_names_the_variable(cache, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/proc/x")
    with pytest.raises(ConfigError, match="VLLM_CACHE_ROOT='/proc/x'"):
        torch.compile(mlp(), backend="neuron_store")(torch.randn(3, 16))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("how", [lambda p: p, lambda p: [p, p.with_name("other")]])
def test_a_store_may_be_a_path(cache, tmp_path, monkeypatch, how):
    model, x = mlp(), torch.randn(3, 16)
    shared = tmp_path / "shared"
    with open_store([shared], local=tmp_path / "mine") as store:
        torch.compile(model, backend="neuron_store", options={"store": store})(x)
        (key,) = [p.name for p in (tmp_path / "mine").iterdir() if not p.name.startswith(".")]
        store.promote(key)
    torch._dynamo.reset()
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    fast = torch.compile(model, backend="neuron_store", options={"store": how(shared)})
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert (cache / key).is_dir()
