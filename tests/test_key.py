from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_store.artifact import is_key
from neuron_store.compiler_flags import canonical_flags
from neuron_store.errors import ConfigError
from neuron_store.key import compute_key, digest, with_extra

BASE = {
    "graph": digest(b"HloModule m"),
    "graph_format": "hlo",
    "compiler": "neuronx-cc",
    "compiler_version": "2.21.33363.0+82129205",
    "compiler_flags": canonical_flags("--auto-cast=none -O1"),
    "target": "trn2",
    "framework": "2.13.0",
    "extra:kernels": ["a", "b"],
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
component_sets = st.dictionaries(st.text(min_size=1, max_size=6), values, min_size=1, max_size=5)


def spelled(value):
    """A value told apart as keys must tell it: by type as well as by size, lists and tuples one."""
    if isinstance(value, list | tuple):
        return ("list", tuple(spelled(v) for v in value))
    if isinstance(value, dict):
        return ("dict", frozenset((k, spelled(v)) for k, v in value.items()))
    return (type(value).__name__, repr(value))


def test_a_key_is_32_lower_case_hex_digits():
    key = compute_key(BASE)
    assert len(key) == 32
    assert set(key) <= set("0123456789abcdef")
    assert is_key(key)


def test_the_key_of_given_components_never_changes_between_releases():
    # Changing this value throws away everybody's cache: raise the format on purpose only.
    assert compute_key({"graph": "g", "target": "trn2"}) == "91e10176aea12c89f7ab50157a4836f1"


@given(component_sets, st.randoms())
def test_the_order_in_which_components_were_named_is_not_in_the_key(components, random):
    names = list(components)
    random.shuffle(names)
    assert compute_key({n: components[n] for n in names}) == compute_key(components)


@given(component_sets, component_sets)
def test_different_components_have_different_keys(one, other):
    assert (compute_key(one) == compute_key(other)) == (spelled(one) == spelled(other))


@given(component_sets, st.text(min_size=1, max_size=6), values)
def test_a_component_more_or_a_changed_one_changes_the_key(components, name, value):
    """Pitfalls 10 and 12: whatever is named as a component is in the key."""
    changed = {**components, name: value}
    same = name in components and spelled(components[name]) == spelled(value)
    assert (compute_key(changed) == compute_key(components)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1", "b": "2"}, {"a": '1","b":"2'}),
        ({"a": "x|b=y"}, {"a": "x", "b": "y"}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": None}, {"a": "null"}),
        ({"a": []}, {"a": {}}),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ({"ab": "c"}, {"a": "bc"}),
    ],
)
def test_components_that_could_be_confused_are_told_apart(one, other):
    assert compute_key(one) != compute_key(other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("graph", digest(b"HloModule n")),
        ("graph_format", "stablehlo"),
        ("compiler", "iree"),
        ("compiler_version", "2.21.33363.0+82129206"),
        ("compiler_flags", canonical_flags("--auto-cast=none -O2")),
        ("target", "trn1"),
        ("framework", "2.13.1"),
        ("extra:kernels", ["a"]),
        ("extra:new", None),
    ],
)
def test_each_single_changed_component_gives_another_key(name, value):
    assert compute_key({**BASE, name: value}) != compute_key(BASE)


def test_one_changed_byte_of_the_graph_gives_another_key():
    graph = bytes(range(256))
    keys = {compute_key({"graph": digest(graph)})}
    for at in range(len(graph)):
        changed = bytearray(graph)
        changed[at] ^= 1
        keys.add(compute_key({"graph": digest(bytes(changed))}))
    assert len(keys) == 257


def test_pieces_of_a_graph_have_the_digest_of_the_whole():
    assert digest([b"ab", memoryview(b"cd"), b""]) == digest(b"abcd") == digest(memoryview(b"abcd"))


def test_extra_components_keep_a_name_of_their_own():
    assert with_extra({"graph": "g"}, {"graph": "x"}) == {"graph": "g", "extra:graph": "x"}
    assert with_extra({"graph": "g"}, None) == {"graph": "g"}


def test_a_tuple_and_a_list_are_one_since_a_record_gives_lists_back():
    assert compute_key({"a": ("x", ("y",))}) == compute_key({"a": ["x", ["y"]]})


@pytest.mark.parametrize(
    ("components", "named"),
    [
        ({}, "at least one"),
        ({"": "x"}, "name ''"),
        ({1: "x"}, "name 1"),
        ({"a": b"x"}, "a is bytes"),
        ({"a": float("nan")}, "a is float"),
        ({"a": float("inf")}, "a is float"),
        ({"a": {"b": [0, object]}}, r"a\.b\[1\] is type"),
        ({"a": {1: 2}}, "name 1"),
        ({"a": {"x"}}, "a is set"),
    ],
)
def test_a_component_that_is_no_json_value_is_refused_by_name(components, named):
    with pytest.raises(ConfigError, match=named):
        compute_key(components)


def test_a_component_without_end_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested"):
        compute_key({"a": loop})


CHILD = """
import os, sys
from neuron_store.compiler_flags import canonical_flags
from neuron_store.key import compute_key, digest
home = os.environ["HOME"]
print(compute_key({
    **{name: sorted({"x", "y", "z"}) for name in {"p", "q", "r"}},
    "graph": digest(b"g"),
    "compiler_flags": canonical_flags(
        f"--dump={home}/d --cache_dir {home}/c -O1 --x='--in={home}/y --z=1' --log={home}/l"),
}))
"""


def test_equal_components_have_one_key_in_every_process_whatever_its_environment(tmp_path):
    """Pitfall 11: another home, cache root, rank or hash seed changes no key."""
    keys = set()
    for seed, home, rank in [("0", "/home/al", "0"), ("1", "/data/bob", "3"), ("77", "/root", "9")]:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "HOME": home,
            "RANK": rank,
            "LOCAL_RANK": rank,
        }
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        keys.add(done.stdout.strip())
    assert len(keys) == 1
