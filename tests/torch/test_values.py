"""Values that the compiler, left to itself, computes wrongly, against eager."""

from __future__ import annotations

import itertools
import logging
import math

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from neuron_store.errors import CompileError, UnsupportedOperator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

inf, nan = math.inf, math.nan
# No number so small that the CPU may take it for zero.
FLOATS = [-inf, -100.0, -3.5, -3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 2.5, 3.0, 9.0, 10.0,
          16777215.0, inf, nan]  # fmt: skip
INTEGERS = [-(2**31), -7, -3, -2, -1, 0, 1, 2, 3, 7, 40]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def compiled(function):
    return torch.compile(function, backend="neuron_store", options={"fallback": "error"})


def flat(results):
    return list(results) if isinstance(results, list | tuple) else [results]


def close(got, want, *, signs=True):
    for g, w in zip(flat(got), flat(want), strict=True):
        tolerance = TOLERANCE.get(w.dtype, 0)
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
        if signs and w.is_floating_point():  # those of zeros
            assert torch.equal(g.signbit() & (g == 0), w.signbit() & (w == 0))


def equal_eager(function, *inputs, signs=True):
    close(compiled(function)(*inputs), function(*inputs), signs=signs)


def pairs(values, dtype):
    left, right = zip(*itertools.product(values, values), strict=True)
    return torch.tensor(left).to(dtype), torch.tensor(right).to(dtype)


# -- powers -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_power_of_special_numbers_is_that_of_eager(cache, dtype):
    equal_eager(torch.pow, *pairs(FLOATS, dtype))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_powers_of_integers_wrap_and_negative_exponents_give_quotients(cache, dtype):
    equal_eager(
        lambda x, y: [torch.pow(x, y), x**3, x**70, x**2.5, torch.pow(-2, y), torch.pow(3, y)],
        *pairs(INTEGERS, dtype),
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_constant_exponents_and_constant_bases_give_the_powers_of_eager(cache, dtype):
    exponents = (10, 9, 9.0, 0, -1, 2, 33, 100, -17, 0.5, -0.5, 1 / 3, inf, -inf, nan)
    bases = (-2.0, 0.0, -0.0, inf, -inf, 1, -1, 2, nan)
    equal_eager(
        lambda x: [*(x**e for e in exponents), *(torch.pow(b, x) for b in bases)],
        torch.tensor(FLOATS, dtype=dtype),
    )


@torch.no_grad()
def test_a_power_of_constants_is_not_folded_into_garbage(cache):
    equal_eager(
        lambda x: [x + torch.pow(-2.0, torch.tensor([2.0, 3.0])), torch.tensor([-2.0]) ** 3.0],
        torch.zeros(2),
    )


@torch.no_grad()
def test_whole_powers_of_whole_numbers_are_exact(cache):
    x = torch.tensor([3.0, -3.0, 2.0, -1.0])
    assert compiled(lambda x: x**9)(x).tolist() == [19683.0, -19683.0, 512.0, -1.0]


number = st.floats(-1e4, 1e4, width=32).filter(lambda f: f == 0 or abs(f) > 1e-4)
exponent = st.one_of(
    st.integers(-30, 30).map(float), st.floats(-20, 20, width=32, allow_subnormal=False)
)
SIZE = 16


def test_powers_of_any_numbers_are_those_of_eager(cache):
    with torch.no_grad():
        fast = compiled(torch.pow)

        @settings(
            max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(st.lists(st.tuples(number, exponent), min_size=SIZE, max_size=SIZE))
        def check(drawn):
            x, y = (torch.tensor(column) for column in zip(*drawn, strict=True))
            want = torch.pow(x, y)
            normal = ~((want.abs() < 1.2e-38) & (want != 0))
            close(torch.where(normal, fast(x, y), 0), torch.where(normal, want, 0))

        check()


# -- angles and others ------------------------------------------------------------------------


@torch.no_grad()
def test_sine_and_cosine_are_right_at_the_positions_of_long_contexts(cache):
    x = torch.cat([torch.linspace(-(10.0**e), 10.0**e, 501) for e in range(8)])
    special = torch.tensor([0.0, -0.0, inf, -inf, nan])
    equal_eager(lambda x: (x.sin(), x.cos()), torch.cat([x, special]))
    huge = torch.tensor([1e10, -3e38])
    assert all((r.abs() <= 1).all() for r in compiled(lambda x: (x.sin(), x.cos()))(huge))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_atan2_knows_infinities_and_the_signs_of_zeros(cache, dtype):
    equal_eager(torch.atan2, *pairs(FLOATS, dtype))


UNARY = "abs neg sign sgn exp expm1 log log1p log2 log10 sqrt rsqrt reciprocal tanh sigmoid erf"


@torch.no_grad()
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functions_of_numbers_outside_of_their_domain_are_those_of_eager(cache, dtype, constant):
    def function(x):
        given = torch.tensor(FLOATS, dtype=dtype) if constant else x
        return [x + 1, given / 0, *(getattr(torch, name)(given) for name in UNARY.split())]

    # The compiler's expm1 and log1p of float64 lose the sign of a zero.
    equal_eager(function, torch.tensor(FLOATS, dtype=dtype), signs=dtype != torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_casts_of_numbers_that_the_type_has_not_are_those_of_eager(cache, dtype):
    types = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
    x = torch.tensor([-inf, inf, nan, -3.5, -1.0, 255.0, 300.0, -300.0, 0.5, -0.0], dtype=dtype)
    equal_eager(lambda x: [x.to(t) for t in types], x)


@torch.no_grad()
def test_integers_and_booleans_become_bfloat16(cache):
    inputs = [torch.arange(-5, 400, 7), torch.arange(9, dtype=torch.uint8), torch.ones(3) > 0]
    equal_eager(lambda *xs: [x.to(torch.bfloat16) for x in xs], *inputs)


@torch.no_grad()
def test_numbers_that_an_unsigned_type_has_not_wrap(cache):
    x = torch.arange(7, dtype=torch.uint8)
    equal_eager(lambda x: [x + (-1), x % -3, x.clamp(-1, 3), x.masked_fill(x > 3, -1)], x)


@torch.no_grad()
def test_float64_has_hyperbolic_tangents_and_the_gelu_made_of_them(cache):
    x = torch.linspace(-30, 30, 101, dtype=torch.float64)
    equal_eager(lambda x: [x.tanh(), torch.nn.functional.gelu(x, approximate="tanh")], x)


# -- reductions -------------------------------------------------------------------------------


@torch.no_grad()
def test_sums_of_constants_count_every_element(cache):
    def function(x):
        half, small = torch.ones(7, dtype=torch.bfloat16), torch.full((3, 2), 2, dtype=torch.int32)
        true = torch.ones(3, dtype=torch.bool)
        return [
            x + 1, half.sum(), half.float().sum(), half.mean(), half.var(unbiased=False),
            small.sum(), small.to(torch.int64).sum(), small.float().mean(), small.cumsum(0),
            true.sum(), true.float().sum(), true.to(torch.int32).sum(), x.eq(x).float().sum(),
            (x.isnan() | ~x.isnan()).sum(),
            torch.nn.functional.cross_entropy(x, torch.tensor([0, 3, 1])),
        ]  # fmt: skip

    equal_eager(function, torch.randn(3, 4))


@torch.no_grad()
def test_a_sort_keeps_equal_elements_in_their_order(cache):
    def function(x):
        kinds = (x, x.float(), x.to(torch.uint8), x.to(torch.int16), x > 1)
        return [
            part
            for kind in kinds
            for descending in (False, True)
            for part in torch.sort(kind, dim=0, stable=True, descending=descending)
        ]

    equal_eager(function, torch.randint(0, 3, (50,)))
    equal_eager(lambda x: torch.sort(x, stable=True)[1], torch.tensor([0.0, nan, -0.0, -inf, inf]))


@torch.no_grad()
def test_the_largest_of_bytes_are_found(cache):
    x = torch.randperm(200)[:35].to(torch.uint8).view(5, 7)
    equal_eager(lambda x: [*x.topk(3), *x.topk(2, dim=0, largest=False)], x)


SCALARS = {
    "softmax": lambda s: s.softmax(0),
    "log_softmax": lambda s: s.log_softmax(-1),
    "sum": lambda s: (s.sum(0), s.sum(-1, keepdim=True), s.cumsum(0), s.cumprod(0)),
    "max": lambda s: (*s.max(0), *s.min(-1), s.amax(0), s.amin(-1)),
    "mean": lambda s: (s.mean(0), s.prod(0), s.logsumexp(0), torch.linalg.vector_norm(s, dim=0)),
    "var": lambda s: (s.var(0, unbiased=False), s.std(0, unbiased=False)),
    "sort": lambda s: (*s.sort(0), *s.topk(1)),
    "any": lambda s: ((s > 0).any(0), (s > 0).all(-1)),
    "argmax": lambda s: (s.argmax(0), s.argmin(0, keepdim=True)),
    "index_select": lambda s: (
        s.index_select(0, torch.tensor([0])),
        s.gather(0, torch.tensor(0)),
        s.gather(0, torch.tensor([0])),
    ),
    "scatter": lambda s: (
        s.scatter(0, torch.tensor(0), torch.tensor(2.0)),
        s.scatter(0, torch.tensor([0]), 2.0),
        s.scatter_add(0, torch.tensor(0), torch.tensor(2.0)),
        s.index_add(0, torch.tensor(0), torch.tensor(5.0)),
        s.index_copy(0, torch.tensor([0]), torch.tensor([5.0])),
    ),
    "flip": lambda s: s.flip(0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SCALARS)
def test_a_tensor_without_dimensions_has_dimension_zero(cache, name):
    equal_eager(SCALARS[name], torch.tensor(1.5))


@torch.no_grad()
def test_products_over_nothing_are_zero(cache):
    inputs = (torch.zeros(3, 4, 0), torch.zeros(3, 0, 2), torch.randn(4, 2))
    equal_eager(
        lambda a, b, c: [a @ b, a[0] @ b[0], torch.addmm(c, a[0], b[0]), torch.baddbmm(c, a, b),
                         a[0] @ b[0, :, 0]],
        *inputs,
    )  # fmt: skip
    equal_eager(
        lambda a: [a.sum(1), a.prod(1), a.cumsum(1), a.any(1), a.logsumexp(1), a.softmax(1)],
        torch.zeros(4, 0),
    )


# -- what is refused --------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.sin, "aten.sin"),
        (lambda x: torch.atan2(x, x), "aten.atan2"),
        (lambda x: x % 2, "aten.remainder"),
        (lambda x: torch.fmod(x, 2), "aten.fmod"),
        (lambda x: torch.div(x, 3, rounding_mode="floor"), "aten.div"),
    ],
)
def test_functions_that_the_compiler_has_not_for_float64_run_eagerly(cache, caplog, function, name):
    x = torch.randn(5, dtype=torch.float64)
    with pytest.raises(UnsupportedOperator, match=rf"{name}.*float64"):
        compiled(function)(x)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, logger="neuron_store.torch"):
        assert torch.equal(torch.compile(function, backend="neuron_store")(x), function(x))
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "neuron_store.torch"]
    assert name in warning


@torch.no_grad()
def test_a_rule_that_fails_lets_the_graph_run_eagerly(cache, caplog, monkeypatch):
    from neuron_store.lowering._rules import RULES, Rule

    def broken(x, size):
        raise IndexError(f"no {size}")

    monkeypatch.setitem(RULES, "aten.view.default", Rule(broken))
    function, x = lambda x: x.view(6) + 1, torch.randn(2, 3)
    with pytest.raises(UnsupportedOperator, match="aten.view.default.*IndexError: no") as caught:
        compiled(function)(x)
    assert isinstance(caught.value.__cause__, CompileError)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, logger="neuron_store.torch"):
        assert torch.equal(torch.compile(function, backend="neuron_store")(x), function(x))
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "neuron_store.torch"]
    assert "aten.view.default" in warning
    assert "IndexError" in warning
