import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import itertools
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import types
import uuid
from collections.abc import Mapping

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, SecretStr

from neuron_store.manifest.coercion import Limits, to_plain
from neuron_store.manifest.masking import MASK, is_secret_name

SECRET_NAMES = [
    *("token", "hf_token", "HF_TOKEN", "api_key", "apiKey", "api_keys", "AWS_SECRET_ACCESS_KEY"),
    *("access_key_id", "password", "db_passwd", "client_secret", "key", "private_key"),
    *("authToken", "Authorization", "ssh_key_path", "sas_url", "session-token", "credentials"),
    *("passwords", "pass", "db_pass", "DB_PASS", "dbpass", "userPass", "hftoken", "apitoken"),
    *("HFTOKEN", "sshkey", "WANDBKEY", "github_pat", "GITLAB_PAT", "auth_header", "x-api-key"),
    *("dbpassword", "clientsecret", "apikeys", "hf_token_value", "AUTH_TOKEN", "wandb_key"),
]
ORDINARY_NAMES = [
    *("tokenizer", "tokenizer_mode", "pad_token_id", "max_tokens_per_step", "key_cache_dtype"),
    *("num_key_value_heads", "keyword", "monkey", "hotkeys_enabled", "tokenize", "secretary"),
    *("passive", "max_model_len", "eos_token", "stop_tokens", "max_tokens", "kv_cache_keys"),
    *("bos_token", "pad_token", "unk_token", "image_token_index", "special_tokens_map", "eostoken"),
    *("additional_special_tokens", "cache_key", "sort_key", "pass_config", "custom_pre_pass"),
    *("hlo_passes", "bypass", "compass", "pattern", "auth_mode", "query_key_value", "turkey"),
    *("max_num_batched_tokens", "primarykey", "author", "num_speculative_tokens", "attn_heads"),
]


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    THREE = 3


@dataclasses.dataclass
class Data:
    b: int = 1
    a: str = "x"


@attrs.frozen
class Attrs:
    size: int = 2


class Pydantic(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    z: int = 1
    password: SecretStr = SecretStr("hunter2")
    where: pathlib.Path = pathlib.Path("/models/x")


class Slotted:
    __slots__ = ("a",)


class Opaque:
    def __init__(self, **values):
        self.__dict__.update(values)
        self._private = 1


class Raises:
    def __init__(self):
        self.good = 1

    def __getattribute__(self, name):
        if name == "good":
            raise RuntimeError("secret in the message")
        return super().__getattribute__(name)


class Lies:
    @property
    def __class__(self):
        raise KeyError("no class")


class Dtype:
    """Looks like torch.bfloat16 does."""

    def __repr__(self):
        return "torch.bfloat16"


Dtype.__module__, Dtype.__name__ = "torch", "dtype"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (Level.THREE, 3),
        (Colour.RED, "red"),
        (2.5, 2.5),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (b"bytes", "<5 bytes>"),
        (dt.datetime(2026, 8, 6, 20, 37, tzinfo=dt.UTC), "2026-08-06T20:37:00+00:00"),
        (dt.date(2026, 8, 6), "2026-08-06"),
        (dt.timedelta(days=1, seconds=5), "1 day, 0:00:05"),
        (decimal.Decimal("1.50"), "1.50"),
        (fractions.Fraction(1, 3), "1/3"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        ({3, "b", "a"}, ["a", "b", 3]),
        (frozenset(), []),
        ((1, (2,)), [1, [2]]),
        (range(3), [0, 1, 2]),
        (np.float32(1.5), 1.5),
        (np.int64(7), 7),
        (np.bool_(1), True),
        (np.zeros((3, 4)), "<ndarray float64 [3, 4]>"),
        (np.dtype("int8"), "int8"),
        (Dtype(), "torch.bfloat16"),
        (Data(), {"b": 1, "a": "x"}),
        (Attrs(), {"size": 2}),
        (Pydantic(y=2), {"z": 1, "password": MASK, "where": "/models/x", "y": 2}),
        (Opaque(b=1, a=2), {"a": 2, "b": 1}),
        (Slotted(), f"<{__name__}.Slotted>"),
        (Data, f"{__name__}.Data"),
        (len, "len"),
        (functools.partial(functools.partial(len)), "len"),
        (json, "<module json>"),
        (object(), "<object>"),
        (iter([1]), "<list_iterator>"),
        (10**30, hex(10**30)),
        ({1: "a", "1": "b"}, {"1": "a", "1 (str)": "b"}),
        ({Colour.RED: 1, (1, 2): 2, None: 3}, {"[1, 2]": 2, "null": 3, "red": 1}),
        (types.MappingProxyType({"b": 1, "a": 2}), {"a": 2, "b": 1}),
        (Raises(), {"good": "<unreadable: RuntimeError>"}),
        ("\ud800", "?"),
        ("<object at 0x7f12>", "<object >"),
    ],
)
def test_everything_becomes_json(value, plain):
    assert to_plain(value) == plain
    json.dumps(to_plain(value), allow_nan=False)


def test_an_object_that_raises_costs_no_more_than_itself():
    class Bad:
        def __getattribute__(self, name):
            raise OSError(name)

    plain = to_plain({"bad": Bad(), "lies": Lies(), "good": 1})
    assert plain["good"] == 1
    assert "unreadable" in plain["bad"]
    assert "unreadable" in plain["lies"]


def test_cycles_are_marked_and_repeats_are_not():
    shared = Data()
    node = Opaque(first=shared, second=shared)
    node.me = node
    plain = to_plain(node)
    assert plain["first"] == plain["second"] == {"b": 1, "a": "x"}
    assert plain["me"] == "<cycle: Opaque>"
    ring: list = []
    ring.append(ring)
    assert to_plain(ring) == ["<cycle: list>"]


def test_what_reaches_everything_is_not_walked():
    value = {"logger": logging.getLogger("x"), "lock": threading.Lock(), "os": os, "last": 1}
    plain = to_plain(value)
    assert plain["last"] == 1
    assert len(json.dumps(plain)) < 20_000


def test_size_and_depth_are_bounded():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert "left out" in json.dumps(to_plain(deep))
    wide = {f"k{n}": ["x" * 100] * 100 for n in range(10_000)}
    assert len(json.dumps(to_plain(wide))) < 8 << 20
    assert len(to_plain("x" * 10_000_000)) < 10_000
    small = to_plain(list(range(100)), Limits(items=3))
    assert small[:3] == [0, 1, 2]
    assert len(small) == 4


def test_the_result_does_not_depend_on_the_hash_seed():
    program = (
        "import json, sys; from neuron_store.manifest.coercion import to_plain\n"
        "print(json.dumps(to_plain({'s': set('abcdefgh'), 'd': {c: 1 for c in set('xyzuvw')},"
        " 'o': object(), 'f': frozenset([(1, 2), 'a', 3])})))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
        max_leaves=30,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_plain_value_becomes_json_twice_the_same(value):
    plain = to_plain(value)
    json.dumps(plain, allow_nan=False).encode()
    assert to_plain(plain) == plain


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets_are_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_names_of_ordinary_settings_are_not_taken_for_secrets(name):
    assert not is_secret_name(name)


def test_counts_of_tokens_stay_and_lists_of_keys_do_not():
    plain = to_plain({"max_num_batched_tokens": 8192, "api_keys": ["a"], "token": None, "key": 5})
    assert plain == {"max_num_batched_tokens": 8192, "api_keys": MASK, "token": None, "key": MASK}


def test_what_a_model_is_configured_with_stays_readable():
    plain = {
        "eos_token": "</s>",
        "stop_tokens": ["</s>", "<|im_end|>"],
        "max_tokens": "12",
        "kv_cache_keys": ["k.0", "k.1"],
        "pad_token_id": 0,
        "tokenizer": "meta-llama/Llama-3.1-8B",
        "stacked": [["qkv_proj", "q_proj"], ["query", "key"]],
        "split": ("key", "value"),
        "shared": [["a_key", None]],
        "pass_config": {"enable_fusion": True},
        "forwarded": ["HF_TOKEN", "WANDB_API_KEY"],
    }
    assert to_plain(plain) == json.loads(json.dumps(plain))


def test_secrets_told_as_pairs_or_by_a_label_are_masked():
    assert to_plain([("HF_TOKEN", "x"), ("PORT", "80")]) == [["HF_TOKEN", MASK], ["PORT", "80"]]
    assert to_plain([("token", "x")]) == [["token", MASK]]
    assert to_plain({"env": [["HF_TOKEN", "x"], "other"]})["env"] == [["HF_TOKEN", MASK], "other"]
    assert to_plain(("HF_TOKEN", "x")) == ["HF_TOKEN", MASK]
    assert to_plain({"name": "api_key", "value": "x"})["value"] == MASK
    assert to_plain({"key": "api_key", "value": "x", "n": 1})["value"] == MASK
    assert to_plain(Opaque(name="HF_TOKEN", value="x"))["value"] == MASK
    assert to_plain({"name": "max_tokens", "value": "12"})["value"] == "12"


class Exits:
    """As a configuration whose lazily made part ends the program."""

    def __init__(self, kind):
        self.kind = kind
        self.broken = 1
        self.good = 2

    def __getattribute__(self, name):
        if name == "broken":
            raise object.__getattribute__(self, "kind")
        return super().__getattribute__(name)


class Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, Odd])
def test_whatever_a_property_raises_stays_in_its_place(kind):
    plain = to_plain(Exits(kind))
    assert plain["broken"] == f"<unreadable: {kind.__name__}>"
    assert plain["good"] == 2


def test_an_interrupt_from_the_keyboard_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        to_plain(Exits(KeyboardInterrupt))


def test_an_argument_vector_is_masked_too():
    assert to_plain(["serve", "--api-key", "abcdef", "--port", "80"]) == [
        *("serve", "--api-key", MASK, "--port", "80")
    ]


def test_a_secret_that_would_be_cut_in_half_is_masked_first():
    text = "x" * 8180 + " hf_" + "a" * 34
    assert "hf_" not in to_plain(text)


def test_a_mapping_that_never_ends_is_cut_off():
    class Endless(Mapping):
        def __iter__(self):
            return itertools.count()

        def __len__(self):
            return 3

        def __getitem__(self, key):
            return key

    assert to_plain({"x": Endless()})["x"]["<left out>"]
