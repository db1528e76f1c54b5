"""The key of a graph: what is in it, what is not, and what has none."""

from __future__ import annotations

import operator

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import fx  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from neuron_store.errors import ConfigError, Unkeyable  # noqa: E402
from neuron_store.fx_key import graph_components, normal_groups, source_digest  # noqa: E402
from neuron_store.key import compute_key  # noqa: E402

pytestmark = pytest.mark.torch

aten = torch.ops.aten
BASE = {
    "compiler": "iree",
    "compiler_version": "3.13.0",
    "compiler_flags": "--a=1",
    "target": "x86_64/v3",
}


def key(graph, inputs, **changes):
    return compute_key(graph_components(graph, inputs, **{**BASE, **changes}))


def trace(function, *inputs):
    return make_fx(function)(*inputs)


def build(*calls, names=None):
    """A graph of two inputs: each call is (target, args, kwargs), ints in args are node numbers."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for i, (target, args, kwargs) in enumerate(calls):
        node = graph.call_function(target, fx.map_arg(tuple(args), lambda n: n), kwargs)
        node.args = tuple(nodes[a.at] if isinstance(a, At) else a for a in args)
        if names:
            node.name = names[i]
        nodes.append(node)
    graph.output((nodes[-1],))
    return fx.GraphModule(torch.nn.Module(), graph)


class At(int):
    """The number of a node."""

    @property
    def at(self):
        return int(self)


X, Y = At(0), At(1)
PAIR = (torch.zeros(2, 3), torch.zeros(2, 3))


def test_a_key_is_32_hex_and_components_are_named():
    components = graph_components(trace(torch.add, *PAIR), PAIR, **BASE)
    assert set(components) == {
        "graph", "graph_operators", "inputs", "symbols", "framework", "compiler",
        "compiler_version", "compiler_flags", "target", "replica_groups",
    }  # fmt: skip
    assert components["inputs"] == ["float32[2,3](3,1)@cpu"] * 2
    assert components["graph_operators"] == {"aten.add.Tensor": 1}
    assert len(compute_key(components)) == 32


BASELINE = ((aten.add.Tensor, (X, Y), {"alpha": 2}),)

CHANGES = {
    "operator": ((aten.sub.Tensor, (X, Y), {"alpha": 2}),),
    "overload": ((aten.add.Scalar, (X, 1), {"alpha": 2}),),
    "operands swapped": ((aten.add.Tensor, (Y, X), {"alpha": 2}),),
    "operand repeated": ((aten.add.Tensor, (X, X), {"alpha": 2}),),
    "literal": ((aten.add.Tensor, (X, Y), {"alpha": 3}),),
    "literal's type": ((aten.add.Tensor, (X, Y), {"alpha": 2.0}),),
    "literal true, not 1": ((aten.add.Tensor, (X, Y), {"alpha": True}),),
    "no literal": ((aten.add.Tensor, (X, Y), {}),),
    "one more node": (*BASELINE, (aten.neg.default, (At(2),), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_of_the_graph_gives_another_key(change):
    assert key(build(*CHANGES[change]), PAIR) != key(build(*BASELINE), PAIR)


VALUES = {
    "1 and 2": (1, 2),
    "1 and 1.0": (1, 1.0),
    "1 and true": (1, True),
    "0.0 and -0.0": (0.0, -0.0),
    "neighbouring floats": (0.1, 0.1 + 2**-56),
    "a list and a tuple": ([1], (1,)),
    "one list and two": ([1, 2], [[1], 2]),
    "None and its name": (None, "None"),
    "dtypes": (torch.float16, torch.bfloat16),
    "memory formats": (torch.contiguous_format, torch.channels_last),
    "devices": (torch.device("cpu"), torch.device("meta")),
    "slices": (slice(0, 2), slice(0, 3)),
    "strings with commas": (["a,b"], ["a", "b"]),
    "nan and inf": (float("nan"), float("inf")),
    "mappings in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
}


@pytest.mark.parametrize("values", VALUES)
def test_different_literals_give_different_keys(values):
    one, other = VALUES[values]
    call = lambda v: build((aten.add.Tensor, (X, Y), {"alpha": v}))  # noqa: E731
    assert key(call(one), PAIR) != key(call(other), PAIR)
    assert key(call(one), PAIR) == key(call(one), PAIR)


INPUTS = {
    "shape": torch.zeros(3, 2),
    "one dimension more": torch.zeros(1, 2, 3),
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "stride": torch.zeros(3, 2).t(),
    "device": torch.zeros(2, 3, device="meta"),
}


@pytest.mark.parametrize("change", INPUTS)
def test_another_input_gives_another_key(change):
    graph = build(*BASELINE)
    assert key(graph, (INPUTS[change], PAIR[1])) != key(graph, PAIR)


@pytest.mark.parametrize("part", ["compiler", "compiler_version", "compiler_flags", "target"])
def test_another_compiler_version_flag_or_target_gives_another_key(part):
    graph = build(*BASELINE)
    assert key(graph, PAIR, **{part: "other"}) != key(graph, PAIR)


def test_values_of_inputs_are_not_in_the_key():
    graph = build(*BASELINE)
    assert key(graph, PAIR) == key(graph, (torch.ones(2, 3), torch.randn(2, 3)))


def test_node_names_are_not_in_the_key():
    plain, renamed = build(*BASELINE), build(*BASELINE, names=["tensor_of_rank_3"])
    assert str(plain.graph) != str(renamed.graph)
    assert key(plain, PAIR) == key(renamed, PAIR)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.device("cuda:1"), torch.device("cuda:0")),
        ("neuron:3", "neuron:0"),
        ("cuda:7", "cuda:2"),
        (["neuron:3"], ["neuron:1"]),
    ],
)
def test_device_indices_are_normalised_also_in_strings(one, other):
    """Pitfall 11."""
    call = lambda v: build((aten.add.Tensor, (X, Y), {"alpha": v}))  # noqa: E731
    assert key(call(one), PAIR) == key(call(other), PAIR)


def test_a_string_that_only_resembles_a_device_is_kept():
    call = lambda v: build((aten.add.Tensor, (X, Y), {"alpha": v}))  # noqa: E731
    assert key(call("layer:3"), PAIR) != key(call("layer:0"), PAIR)


def constant(tensor):
    module = torch.nn.Module()
    module.any_name = tensor
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.add.Tensor, (x, graph.get_attr("any_name"))),))
    return fx.GraphModule(module, graph)


def test_constants_count_by_their_bytes_shape_and_type():
    tensors = [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.5]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0]).view(torch.int32),
    ]
    keys = [key(constant(t), PAIR[:1]) for t in tensors]
    assert len(set(keys)) == len(keys)
    assert key(constant(tensors[0].clone()), PAIR[:1]) == keys[0]


def test_a_constant_without_values_cannot_be_keyed():
    with pytest.raises(Unkeyable, match="constant tensor"):
        key(constant(torch.zeros(2, device="meta")), PAIR[:1])


def branches(true_branch, false_branch):
    def function(x, y):
        return torch.cond(x.sum() > 0, true_branch, false_branch, (x, y))

    return trace(function, *PAIR)


def test_branches_of_a_cond_are_in_the_key():
    add, sub = (lambda x, y: x + y), (lambda x, y: x - y)
    mul = lambda x, y: x * y  # noqa: E731
    keys = [key(branches(a, b), PAIR) for a, b in [(add, sub), (sub, add), (add, mul), (mul, sub)]]
    assert len(set(keys)) == len(keys)
    assert key(branches(add, sub), PAIR) == keys[0]


def test_a_nested_graph_counts_by_its_content_wherever_it_is_kept():
    def nested(name, function):
        module = torch.nn.Module()
        setattr(module, name, trace(function, *PAIR))
        graph = fx.Graph()
        nodes = [graph.placeholder("x"), graph.placeholder("y")]
        graph.output((graph.call_module(name, tuple(nodes)),))
        return fx.GraphModule(module, graph)

    assert key(nested("a", torch.add), PAIR) == key(nested("b", torch.add), PAIR)
    assert key(nested("a", torch.add), PAIR) != key(nested("a", torch.mul), PAIR)


# -- symbolic shapes ---------------------------------------------------------------------------


def dynamic(function, *inputs, bounds=None, names=None):
    """The graph that Dynamo and AOT Autograd make, with symbols."""
    found = []

    def keep(gm, _):
        found.append(gm)
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0, **(bounds or {}))
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    return found[0]


def test_symbols_are_taken_from_the_trace_and_named_by_first_use():
    graph = dynamic(lambda x: x * 2, torch.zeros(4, 3))
    components = graph_components(graph, (4, torch.zeros(4, 3)), **BASE)
    assert components["inputs"] == ["SymInt d0", "float32[d0,3](3,1)@cpu"]
    assert components["symbols"][0].startswith("d0:[2,")


def test_one_trace_has_one_key_whatever_size_it_was_made_with():
    a = dynamic(lambda x: x * 2, torch.zeros(4, 3))
    b = dynamic(lambda x: x * 2, torch.zeros(7, 3))
    assert key(a, (4, torch.zeros(4, 3))) == key(b, (7, torch.zeros(7, 3)))


def test_another_range_gives_another_key():
    a = dynamic(lambda x: x * 2, torch.zeros(4, 3), bounds={"min": 2, "max": 64})
    b = dynamic(lambda x: x * 2, torch.zeros(4, 3), bounds={"min": 2, "max": 128})
    assert key(a, ()) != key(b, ())


def test_two_sizes_that_may_differ_are_not_two_that_are_equal():
    apart = dynamic(lambda x, y: (x * 2, y * 2), torch.zeros(4, 3), torch.zeros(6, 3))
    equal = dynamic(lambda x, y: (x * 2, y * 2, x + y), torch.zeros(4, 3), torch.zeros(4, 3))
    assert len(graph_components(apart, **BASE)["symbols"]) == 2
    assert len(graph_components(equal, **BASE)["symbols"]) == 1


def test_a_symbolic_graph_is_not_a_concrete_one():
    graph = dynamic(lambda x: x * 2, torch.zeros(4, 3))
    assert key(graph, ()) != key(trace(lambda x: x * 2, torch.zeros(4, 3)), (torch.zeros(4, 3),))


# -- what cannot be keyed ------------------------------------------------------------------------


class Opaque:
    """An object of no meaning to anybody else."""

    def __repr__(self):
        return "None"  # FX writes it into source code


@pytest.mark.parametrize(
    ("target", "args", "told"),
    [
        (lambda x: x, (X,), "code is not in the graph"),
        (key, (X, Y), "function .*key"),
        (aten.add.Tensor, (X, Opaque()), "Opaque"),
        (aten.add.Tensor, (X, {1: 2}), "not a string"),
        (aten.add.Tensor, (X, {1, 2}), "set"),
    ],
)
def test_what_has_no_meaning_elsewhere_is_refused_by_name(target, args, told):
    with pytest.raises(Unkeyable, match=told):
        key(build((target, args, {})), PAIR)


def test_functions_of_python_and_torch_count_by_name():
    keys = {
        key(build((t, (X, Y), {})), PAIR)
        for t in (operator.add, operator.mul, torch.add, torch.nn.functional.linear)
    }
    assert len(keys) == 4


def test_a_custom_operator_needs_its_source_among_the_extra_components():
    with torch.library._scoped_library("neuron_store_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        graph = build((torch.ops.neuron_store_test.twice.default, (X,), {}))
        with pytest.raises(Unkeyable, match=r"op:neuron_store_test::twice"):
            key(graph, PAIR)
        one = key(graph, PAIR, extra={"op:neuron_store_test::twice": "1"})
        assert one != key(graph, PAIR, extra={"op:neuron_store_test::twice": "2"})


def test_a_leaf_module_is_refused():
    class Leaf(torch.nn.Module):
        def forward(self, x):
            return x

    graph = fx.Graph()
    graph.output((graph.call_module("leaf", (graph.placeholder("x"),)),))
    root = torch.nn.Module()
    root.leaf = Leaf()
    with pytest.raises(Unkeyable, match="Leaf"):
        key(fx.GraphModule(root, graph), PAIR[:1])


def test_a_wrong_number_of_examples_is_refused():
    with pytest.raises(Unkeyable, match="2 inputs and 1"):
        key(build(*BASELINE), PAIR[:1])


# -- extra components and groups -----------------------------------------------------------------


def test_extra_components_are_in_the_key_under_their_names():
    graph = build(*BASELINE)
    components = graph_components(graph, PAIR, **BASE, extra={"kernels": ["a", 1]})
    assert components["extra:kernels"] == ["a", 1]
    assert compute_key(components) != key(graph, PAIR)


@pytest.mark.parametrize("value", [object(), float("nan"), b"bytes", {1: 2}])
def test_an_extra_component_that_is_no_plain_value_is_refused_by_name(value):
    with pytest.raises(ConfigError, match="kernels"):
        key(build(*BASELINE), PAIR, extra={"kernels": value})


def test_a_source_digest_follows_the_source_alone():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    assert source_digest(one) == source_digest(one) != source_digest(two)
    with pytest.raises(ConfigError, match="source_digest"):
        source_digest(len)


def collective(ranks):
    op = torch.ops.c10d_functional.all_reduce.default
    return build((op, (X, "sum", "tag", ranks, len(ranks)), {}))


def test_replica_groups_count_by_their_relative_ranks():
    assert key(collective([0, 1, 2, 3]), PAIR) == key(collective([4, 5, 6, 7]), PAIR)
    assert key(collective([0, 1, 2, 3]), PAIR) != key(collective([0, 1]), PAIR)
    assert key(collective([0, 1]), PAIR) != key(collective([1, 0]), PAIR)
    assert key(collective([0, 1]), PAIR) != key(collective([0, 2]), PAIR)
    assert key(collective([0, 2]), PAIR) == key(collective([1, 3]), PAIR)


def test_groups_are_counted_from_the_lowest_rank_of_all():
    assert normal_groups([[8, 9], [8, 12]]) == [[0, 1], [0, 4]]
    assert normal_groups([]) == []


def test_a_process_group_that_nobody_knows_is_refused():
    op = torch.ops._c10d_functional.all_reduce.default
    with pytest.raises(Unkeyable, match="process group"):
        key(build((op, (X, "sum", "no such group"), {})), PAIR)


# -- properties ------------------------------------------------------------------------------------

CALLS = st.lists(
    st.tuples(
        st.sampled_from([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.one_of(st.none(), st.integers(-3, 3), st.floats(-2, 2), st.booleans()),
    ),
    min_size=1,
    max_size=6,
)


def from_calls(calls, names=None):
    return build(
        *(
            (t, (At(a % (i + 2)), At(b % (i + 2))), {} if v is None else {"alpha": v})
            for i, (t, a, b, v) in enumerate(calls)
        ),
        names=names,
    )


def spelled(calls):
    return [
        (str(t), a % (i + 2), b % (i + 2), type(v).__name__, repr(v))
        for i, (t, a, b, v) in enumerate(calls)
    ]


@settings(max_examples=60, deadline=None)
@given(CALLS, CALLS)
def test_keys_are_equal_exactly_where_graphs_are(one, other):
    names = [f"name_{i}_of_rank_{len(one)}" for i in range(len(one))]
    assert key(from_calls(one), PAIR) == key(from_calls(one, names), PAIR)
    same = spelled(one) == spelled(other)
    assert (key(from_calls(one), PAIR) == key(from_calls(other), PAIR)) is same


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(SHAPES, SHAPES, st.permutations([0, 1, 2]))
def test_keys_of_inputs_are_equal_exactly_where_layouts_are(one, other, order):
    graph = build(*BASELINE)
    a, b = torch.zeros(one), torch.zeros(other)
    if len(one) == 3:
        a = a.permute(order)
    same = a.shape == b.shape and a.stride() == b.stride()
    assert (key(graph, (a, PAIR[1])) == key(graph, (b, PAIR[1]))) is same
