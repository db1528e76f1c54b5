"""Each operator of the lowering against eager."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
jax = pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from neuron_store.errors import UnsupportedOperator  # noqa: E402
from neuron_store.lowering._rules import RULES, constant_array, torch_dtype  # noqa: E402
from neuron_store.lowering.export import TensorSpec, _Interpreter, export  # noqa: E402
from neuron_store.lowering.operators import OPERATORS, missing_operators  # noqa: E402

pytestmark = pytest.mark.torch

_random = torch.Generator().manual_seed(0)


def real(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=_random).to(dtype)


def whole(*shape, low=-4, high=5, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=_random).to(dtype)


X, Y, I, J = real(3, 4), real(3, 4), whole(3, 4), whole(3, 4, low=1)
P, B, H = X.abs() + 0.5, X > 0, real(3, 4, dtype=torch.bfloat16)
Q, K, V = real(2, 4, 5, 8), real(2, 4, 6, 8), real(2, 4, 6, 8)
UNARY = [(X,), (H,)]
BINARY = [(X, Y), (X, 2), (I, J), (X, J), (H, Y), (H, 0.3), (I, 2.5), (X, Y[0])]
TENSORS = [(X, Y), (I, J), (X, J), (H, Y)]
BITS = [(I, J), (B, X > 1)]

# Operator to calls; a call is the positional arguments, with a mapping at its end for the others.
CASES = {
    **{f"aten.{n}.default": UNARY for n in (
        "abs neg sign sgn square relu silu floor ceil round trunc exp exp2 expm1 sin cos tanh "
        "sigmoid erf isnan isinf isposinf isneginf logical_not gelu leaky_relu alias clone detach "
        "lift_fresh_copy sum mean amax amin max min zeros_like empty_like ones_like argmax argmin "
        "squeeze"
    ).split()},
    **{f"aten.{n}.default": [(P,), (J,)]
       for n in "log log10 log1p log2 sqrt rsqrt reciprocal".split()},
    **{f"aten.{n}.Tensor": BINARY for n in "mul div".split()},
    **{f"aten.{n}.Tensor": TENSORS for n in "eq ne lt le gt ge".split()},
    **{f"aten.{n}.Scalar": [(X, 2), (I, 2), (I, 2.5), (H, 0.3)] for n in
       "mul div eq ne lt le gt ge".split()},
    **{f"aten.{n}.Tensor": [*TENSORS, (X, Y, {"alpha": 3}), (I, J, {"alpha": 2})]
       for n in "add sub rsub".split()},
    **{f"aten.{n}.Scalar": [(X, 2), (I, 2), (I, 2.5), (X, 2, 3)] for n in "add sub rsub".split()},
    **{f"aten.{n}.default": TENSORS for n in "maximum minimum atan2".split()},
    **{f"aten.logical_{n}.default": [*TENSORS, (B, I)] for n in "and or xor".split()},
    **{f"aten.bitwise_{n}.Tensor": BITS for n in "and or xor".split()},
    **{f"aten.bitwise_{n}.Scalar": [(I, 3)] for n in "and or xor".split()},
    **{f"aten.{n}.Tensor": [(X, P), (I, J)] for n in "remainder fmod".split()},
    **{f"aten.{n}.Scalar": [(X, 1.5), (I, 3), (I, -3)] for n in "remainder fmod".split()},
    **{f"aten.{n}.{o}": [(B,), (X,)] if o == "default" else [(B, 1), (B, 1, True)]
       for n in ("any", "all") for o in ("default", "dim")},
    **{f"aten.{n}.dims": [(B, [0, 1]), (B, [1], True)] for n in ("any", "all")},
    **{f"aten.{n}.dim": [(X, 1), (X, 0, True)] for n in ("max", "min")},
    **{f"aten.{n}.default": [(X, 1), (H, -1), (X, 0, False)] for n in ("_softmax", "_log_softmax")
       for _ in (0,)},
    "aten.add.Tensor": [*TENSORS, (X, Y, {"alpha": 3}), (B, B), (X, torch.tensor(2.0))],
    "aten.gelu.default": [*UNARY, (X, {"approximate": "tanh"})],
    "aten.bitwise_not.default": [(I,), (B,)],
    "aten.floor_divide.default": [(I, J), (I, 3), (X, P)],
    "aten.div.Tensor_mode": [(a, b, {"rounding_mode": m}) for a, b in ((X, P), (I, J))
                             for m in ("floor", "trunc", None)],
    "aten.div.Scalar_mode": [(I, 3, {"rounding_mode": "trunc"}),
                             (X, 2, {"rounding_mode": "floor"})],
    "aten.pow.Tensor_Tensor": [(P, Y), (I, J)],
    "aten.pow.Tensor_Scalar": [(X, 2), (P, 0.5), (X, 3), (P, -1), (I, 2), (H, 2)],
    "aten.pow.Scalar": [(2, X), (2, J)],
    "aten.hardtanh.default": [(X,), (X, -0.5, 0.5)],
    "aten.clamp.default": [(X, -0.5, 0.5), (X, None, 0.2), (I, 0), (H, -0.5)],
    "aten.clamp.Tensor": [(X, Y), (X, None, Y)],
    "aten.clamp_min.default": [(X, 0.1), (I, 1)],
    "aten.clamp_min.Tensor": [(X, Y)],
    "aten.clamp_max.default": [(X, 0.1)],
    "aten.clamp_max.Tensor": [(X, Y)],
    "aten.addcmul.default": [(X, Y, P), (X, Y, P, {"value": 2})],
    "aten.threshold_backward.default": [(X, Y, 0)],
    "aten.where.self": [(B, X, Y), (B, X, J), (B[:, :1], X, Y[0])],
    "aten.where.ScalarOther": [(B, X, 0)],
    "aten.where.ScalarSelf": [(B, 1.0, X)],
    "aten.where.Scalar": [(B, 1.0, 0.0)],
    "aten.masked_fill.Scalar": [(X, B, -math.inf), (I, B, 7)],
    "aten.masked_fill.Tensor": [(X, B, torch.tensor(3.0))],
    "aten._to_copy.default": [(X, {"dtype": torch.float64}), (X, {"dtype": torch.int32}), (X,),
                              (I, {"dtype": torch.bfloat16}), (B, {"dtype": torch.float16})],
    "aten.copy.default": [(X, Y), (X, Y[0]), (I, X)],
    "prims.convert_element_type.default": [(X, torch.int32)],
    "aten.sum.default": [(X,), (I,), (B,), (H,), (X, {"dtype": torch.float64})],
    "aten.sum.dim_IntList": [(X, [1]), (X, [0, 1], True), (X, None), (B, [0]), (X, [])],
    "aten.prod.default": [(X,), (I,)],
    "aten.prod.dim_int": [(X, 1), (I, 0, True)],
    "aten.mean.dim": [(X, [1]), (X, [0, 1], True), (H, [-1])],
    "aten.var.correction": [(X, [1]), (X, [0], {"correction": 0, "keepdim": True}), (X,)],
    "aten.var_mean.correction": [(X, [1], {"correction": 0}), (H, [1], {"keepdim": True})],
    "aten.amax.default": [(X, [1]), (X, [0, 1], True), (X,)],
    "aten.amin.default": [(X, [1]), (X, [0, 1], True), (X,)],
    "aten.argmax.default": [(X,), (X, 1), (X, 1, True)],
    "aten.argmin.default": [(X,), (X, 1), (X, 1, True)],
    "aten.std.correction": [(X, [1]), (X, [0], {"correction": 0, "keepdim": True}), (H,)],
    "aten.cumsum.default": [(X, 1), (I, 0), (B, 0)],
    "aten.cumprod.default": [(X, 1), (I, 0)],
    "aten.logsumexp.default": [(X, [1]), (X, [0], True)],
    "aten.linalg_vector_norm.default": [(X,), (X, 2, [1], True)],
    "aten._softmax.default": [(X, 1, False), (H, -1, False)],
    "aten._log_softmax.default": [(X, 1, False), (H, -1, False)],
    "aten.native_layer_norm.default": [(X, [4], Y[0], Y[1], 1e-5), (X, [3, 4], None, None, 1e-5)],
    "aten._native_batch_norm_legit_no_training.default": [
        (real(2, 4, 3), Y[0], Y[1], Y[2], P[0], 0.1, 1e-5), (X, None, None, Y[2], P[0], 0.1, 1e-5)],
    "aten.sort.default": [(X,), (X, 0, True)],
    "aten.sort.stable": [(I, {"stable": True, "dim": 1, "descending": True})],
    "aten.topk.default": [(X, 2), (X, 2, 0, False)],
    **{f"aten.{n}.default": [(X, [2, -1]), (X, [12])] for n in ("view", "_unsafe_view", "reshape")},
    "aten.view.dtype": [(X, torch.int32)],
    "aten.permute.default": [(Q, [0, 2, -1, 1])],
    "aten.transpose.int": [(X, 0, 1), (Q, -1, 1)],
    "aten.t.default": [(X,), (X[0],)],
    "aten.expand.default": [(X[:, :1], [3, 4]), (X, [2, -1, -1])],
    "aten.squeeze.default": [(X[:1, None],)],
    "aten.squeeze.dim": [(X[:1], 0), (X, 0), (X[:, :1], -1)],
    "aten.squeeze.dims": [(X[:1, None], [0, 1])],
    "aten.unsqueeze.default": [(X, 0), (X, -1)],
    "aten.slice.Tensor": [(X, 1, 1, 3), (X, 0, -2, 9223372036854775807), (X, 1, 0, 4, 2), (X,)],
    "aten.select.int": [(X, 1, 2), (X, 0, -1)],
    "aten.slice_scatter.default": [(X, Y[:, :2], 1, 1, 3)],
    "aten.select_scatter.default": [(X, Y[0], 0, -1), (X, Y[:, 0], 1, 2)],
    "aten.cat.default": [([X, Y], 1), ([X, Y],), ([torch.zeros(0), X], 0), ([X, I],)],
    "aten.stack.default": [([X, Y], 1), ([X, Y],)],
    "aten.split.Tensor": [(X, 2), (X, 3, 1)],
    "aten.split_with_sizes.default": [(X, [1, 3], 1)],
    "aten.unbind.int": [(X,), (X, 1)],
    "aten.repeat.default": [(X, [2, 1, 3])],
    "aten.flip.default": [(X, [0, 1])],
    "aten.roll.default": [(X, [1], [1]), (X, [2])],
    "aten.constant_pad_nd.default": [(X, [1, 2]), (X, [1, 0, -1, 1], 7.0)],
    "aten.tril.default": [(X,), (X, -1)],
    "aten.triu.default": [(X,), (X, 1)],
    "aten.full.default": [([2, 3], 1.5), ([2], 7), ([2], True), ([2], 1, {"dtype": torch.float16}),
                          ([], 2**40)],
    "aten.full_like.default": [(X, 2), (X, 2, {"dtype": torch.int64})],
    "aten.new_full.default": [(X, [2], 3)],
    "aten.zeros.default": [([2, 3],), ([2], {"dtype": torch.int64})],
    "aten.empty.memory_format": [([0, 3],)],
    "aten.empty_like.default": [(X[:0],)],
    "aten.new_zeros.default": [(I, [2])],
    "aten.new_empty.default": [(I, [0])],
    "aten.new_empty_strided.default": [(I, [0, 2], [2, 1])],
    "aten.empty_strided.default": [([0, 2], [2, 1])],
    "aten.ones.default": [([2, 3],)],
    "aten.new_ones.default": [(H, [2])],
    "aten.scalar_tensor.default": [(2,), (2, {"dtype": torch.int32})],
    "aten.arange.default": [(5,), (2.5,), (5, {"dtype": torch.int32})],
    "aten.arange.start": [(2, 5)],
    "aten.arange.start_step": [(1, 9, 3), (0.0, 1.0, 0.25)],
    "aten.eye.default": [(3,)],
    "aten.mm.default": [(X, Y.t()), (H, H.t())],
    "aten.bmm.default": [(real(2, 3, 4), real(2, 4, 5))],
    "aten.mv.default": [(X, Y[0])],
    "aten.dot.default": [(X[0], Y[0])],
    "aten.addmm.default": [(Y[:, 0], X, Y.t()), (Y[0, 0], X, Y.t(), {"beta": 2, "alpha": 3}),
                           (H[0, :3], H, H.t()), (Y[:, 0] * math.nan, X, Y.t(), {"beta": 0})],
    "aten.baddbmm.default": [(real(2, 3, 5), real(2, 3, 4), real(2, 4, 5))],
    "aten.embedding.default": [(X, whole(2, 5, low=0, high=3)), (X, whole(2, low=0, high=3), 0)],
    "aten.index_select.default": [(X, 1, torch.tensor([3, 0, 3]))],
    "aten.gather.default": [(X, 1, whole(3, 2, low=0, high=4)), (X, 0, whole(2, 4, low=0, high=3))],
    "aten.scatter.src": [(X, 1, torch.tensor([[3, 0], [1, 2]]), Y)],
    "aten.scatter.value": [(X, 0, torch.tensor([[2, 0, 1, 2]]), 9.0)],
    "aten.scatter_add.default": [(X, 1, torch.tensor([[3, 3], [1, 2]]), Y)],
    "aten.index_copy.default": [(X, 1, torch.tensor([3, 0]), Y[:, :2]),
                                (X, 0, torch.tensor([2]), Y[:1])],
    "aten.index_add.default": [(X, 1, torch.tensor([3, 3]), Y[:, :2]),
                               (X, 0, torch.tensor([2]), Y[:1], {"alpha": 2})],
    "aten.index.Tensor": [(X, [torch.tensor([2, 0])]), (X, [None, torch.tensor([[1], [-1]])]),
                          (Q, [None, torch.tensor([1]), None, torch.tensor([2, 3])])],
    "aten.index_put.default": [(X, [torch.tensor([2, 0])], Y[:2]), (X, [B], torch.tensor(5.0)),
                               (X, [torch.tensor([2, 2])], Y[:2], True),
                               (X, [None, torch.tensor([1])], torch.tensor(1.0))],
    "aten._unsafe_index_put.default": [(X, [torch.tensor([2, 0])], Y[:2])],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": [
        (Q, K, V), (Q, Q, Q, 0.0, True), (Q, K, V, {"scale": 0.3}),
        (Q, K, V, {"attn_mask": real(2, 1, 5, 6)})],
}  # fmt: skip
# Those that no single call shows: they are run by models, in test_backend.py.
ELSEWHERE = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "aten.contiguous.default",
    "higher_order.cond",
    "higher_order.invoke_subgraph",
    "higher_order.wrap_with_set_grad_enabled",
}


def operator(name):
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def split(call):
    return (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})


def as_torch(array):
    if isinstance(array, jax.Array):
        data = np.asarray(array)
        if data.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(data)).to(torch_dtype(array.dtype))
    return array


def lowered(function, *inputs):
    """What `function` gives through its graph and the rules, without a compiler."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    assert missing_operators(graph) == []
    with jax.enable_x64(True):
        return [as_torch(r) for r in _Interpreter(graph, {}).run(*map(constant_array, inputs))]


def flat(result):
    return list(result) if isinstance(result, list | tuple) else [result]


def test_the_table_names_every_rule_under_its_module():
    assert {n for names in OPERATORS.values() for n in names} == set(RULES)
    for module, names in OPERATORS.items():
        for name in names:
            assert RULES[name].function.__module__ in {f"neuron_store.lowering.{module}", *JAX}


JAX = {
    RULES[n].function.__module__
    for n in OPERATORS["elementwise"]
    if RULES[n].function.__module__.startswith("jax")
}


def test_every_operator_has_a_case():
    assert {n for names in OPERATORS.values() for n in names} - set(CASES) == ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_operator_equals_eager(name):
    op = operator(name)
    for call in CASES[name]:
        args, kwargs = split(call)
        tensors, rebuild = holes([args, list(kwargs.values())])
        want = flat(op(*args, **kwargs))

        def again(*given, rebuild=rebuild, names=tuple(kwargs)):
            args, values = rebuild(given)
            return op(*args, **dict(zip(names, values, strict=True)))

        got = lowered(again, *tensors)
        assert len(got) == len(want), call
        for g, w in zip(got, want, strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape), (g.dtype, w.dtype, g.shape, w.shape)
            if "empty" in name:
                continue
            exact = not w.dtype.is_floating_point
            close = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(w.dtype, 1e-5)
            tolerance = 0 if exact else close
            torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)


def holes(args):
    """The tensors of a call, and how to put others in their places."""
    tensors = []

    def out(value):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            position = len(tensors) - 1
            return lambda given: given[position]
        if isinstance(value, list | tuple):
            parts = [out(v) for v in value]
            return lambda given: [p(given) for p in parts]
        return lambda _: value

    parts = [out(v) for v in args]
    return tensors, lambda given: [p(given) for p in parts]


@pytest.mark.parametrize(
    ("function", "inputs", "told"),
    [
        (lambda x, m: x[m], (X, B), "depends on the data|nonzero"),
        (lambda x: torch.linalg.vector_norm(x, 3), (X,), "order 3"),
        (lambda x: x.view(torch.int16), (X,), "changes the shape"),
    ],
)
def test_a_form_without_a_rule_is_refused_by_name(function, inputs, told):
    graph = make_fx(function)(*inputs)
    specs = [TensorSpec(tuple(t.shape), t.dtype) for t in inputs]
    with pytest.raises(UnsupportedOperator, match=told) as caught:
        export(graph, specs, {})
    assert caught.value.operator.startswith("aten.")


def test_an_operator_without_a_rule_is_named():
    graph = make_fx(lambda x: torch.linalg.inv(x @ x.t()))(X)
    assert missing_operators(graph) == [
        "aten.linalg_inv_ex.default",
        "aten._linalg_check_errors.default",
    ]


def test_int64_inputs_stay_int64_in_both_forms():
    graph = make_fx(lambda i: i + 1)(I)
    exported = export(graph, [TensorSpec((3, 4), torch.int64)], {})
    assert b"tensor<3x4xi64>) -> (tensor<3x4xi64>" in exported.stablehlo
    assert jax.numpy.asarray(1).dtype == jax.numpy.int32  # elsewhere JAX is as it was


def test_neither_form_holds_a_path_of_this_machine():
    graph = make_fx(lambda x: torch.softmax(x @ x.t(), -1))(X)
    exported = export(graph, [TensorSpec((3, 4), torch.float32)], {})
    for form in (exported.stablehlo, exported.hlo):
        assert b".py" not in form
        assert b"/" not in form.replace(b"//", b"")


def test_exports_of_one_graph_are_equal_bytes():
    graph = make_fx(lambda x: torch.softmax(x @ x.t(), -1))(X)
    spec = [TensorSpec((3, 4), torch.float32)]
    assert export(graph, spec, {}) == export(graph, spec, {})
