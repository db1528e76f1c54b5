"""Keys, file names and records from whoever may write to a tier: no path outside the root."""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_store import InvalidKey, InvalidRecord
from neuron_store.artifact import (
    Artifact,
    ArtifactFile,
    check_file_name,
    check_key,
    dump_record,
    load_record,
)
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore

ROOT = "/var/cache/tier"
KEY = "0123456789abcdef0123456789abcdef"
_WORDS = (
    ". .. ... / // \\ ../ /.. ..\\ ./ ~ ~root $HOME %2e%2e%2f %2e %2F a b key graph - -- -rf = + :"
    " .neuron_store.json .neuron_store .staging .quarantine .git ; | & ? [ ] { } ' \" ` # @ C: NUL"
    " file:// s3:// \u2025 \u2024 \uff0e \uff0f \u2215 \u29f8 \u202e \ufeff \u0130 \ud800 \udcff 0"
    " 0123456789abcdef0123456789abcdef graph_0123456789abcdef0123456789abcdef.neff"
)
_ODD = ("\0", "\n", "\r", "\t", " ", "\x1b", "\x7f", "", "a" * 199, "é", "a\0/etc/passwd")
PIECES = (*_WORDS.split(" "), *_ODD)


def texts(count, seed):
    """Hostile strings, and plausible ones with one hostile change."""
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.random()
        if kind < 0.6:
            yield "".join(chance.choices(PIECES, k=chance.randint(1, 6)))
        elif kind < 0.8:
            yield "/".join(chance.choices(PIECES, k=chance.randint(1, 20)))
        else:
            plausible = list(chance.choice((KEY, "sub/dir/graph.bin", "MODULE_1a2b+3c4d")))
            plausible[chance.randrange(len(plausible))] = chance.choice(PIECES)
            yield "".join(plausible)


def escapes(text):
    """Whether a string gets past the checks and names a path that is not where it belongs."""
    found = []
    try:
        key = check_key(text)
    except InvalidKey:
        pass
    else:
        path = os.path.normpath(f"{ROOT}/{key}")
        if path != f"{ROOT}/{key}" or os.path.dirname(path) != ROOT or key.startswith("."):
            found.append(("key", text))
        if not path.isascii() or not path.isprintable() or len(key) > 255:
            found.append(("key", text))
    try:
        name = check_file_name(text)
    except InvalidRecord:
        pass
    else:
        home = f"{ROOT}/{KEY}"
        path = os.path.normpath(f"{home}/{name}")
        if path != f"{home}/{name}" or not path.startswith(home + "/"):
            found.append(("name", text))
        if not path.isascii() or not path.isprintable() or "\\" in path:
            found.append(("name", text))
        if name.split("/")[0].startswith(".neuron_store"):
            found.append(("name", text))
    return found


def record_escapes(text, other):
    """As `escapes`, for a record that says so."""
    record = json.loads(dump_record(Artifact(KEY, (ArtifactFile("f", 1, "0" * 64),))))
    record["files"] = [{"name": text, "size": 1, "sha256": "0" * 64}]
    record["executable"] = other
    record["inline"] = {other: "eA=="}
    record["key"] = text
    found = []
    for key in (text, KEY):
        try:
            artifact, inline = load_record(json.dumps(record).encode(), key=key, source="test")
        except InvalidRecord:
            continue
        for name in {*(f.name for f in artifact.files), *inline, artifact.executable or "f"}:
            found += escapes(name)
        found += [("record", key)] if artifact.key != key or escapes(key) else []
    return found


def run(count, seed):
    before = None
    for number, text in enumerate(texts(count, seed)):
        assert escapes(text) == []
        if number % 10 == 0 and before is not None:
            assert record_escapes(text, before) == []
        before = text


def test_twenty_thousand_hostile_keys_and_names_stay_inside_the_root():
    run(20_000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_hostile_keys_and_names_stay_inside_the_root(capsys):
    run(1_000_000, seed=2)
    with capsys.disabled():
        print(
            "\n1,000,000 hostile keys and names, 100,000 hostile records: 0 paths outside the root"
        )


def test_the_check_of_this_test_would_see_an_escape(monkeypatch):
    monkeypatch.setattr(f"{__name__}.check_key", lambda key: key)
    monkeypatch.setattr(f"{__name__}.check_file_name", lambda name: name)
    for text in ("../x", "/etc/passwd", "a/../../b", "a\\b", ".neuron_store.json", "a\nb"):
        assert escapes(text)


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=300))
def test_any_text_stays_inside_the_root(text):
    assert escapes(text) == []


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_any_record_stays_inside_the_root(text, other):
    assert record_escapes(text, other) == []


@pytest.mark.parametrize("value", [None, 1, b"key", ["k"], {"k": 1}, "", "k\n", "a" * 201])
def test_what_is_no_safe_name_is_no_key(value):
    with pytest.raises(InvalidKey):
        check_key(value)


@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_no_method_of_a_tier_touches_anything_for_a_hostile_key(tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    root = tmp_path / "tier"
    store = PosixStore(root) if kind == "posix" else MemoryStore(f"hostile-{os.getpid()}")
    into = tmp_path / "into"
    into.mkdir()
    for key in ("../outside", str(outside), "..", ".", "a/b", "a\0b", ".staging", ""):
        for call in (
            lambda key=key: store.find(key),
            lambda key=key: store.open_file(key, "file"),
            lambda key=key: store.fetch(key, into),
            lambda key=key: store.fetch_accepted(key, into, print),
            lambda key=key: store.verify(key),
            lambda key=key: store.delete(key),
            lambda key=key: store.set_aside(key),
            lambda key=key: store.path_of(key),
            lambda key=key: store.endorse(Artifact(key, ())),
            lambda key=key: store.publish(Artifact(key, ()), outside),
        ):
            with pytest.raises(InvalidKey):
                call()
    assert (outside / "file").read_text() == "untouched"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["into", "outside"]
