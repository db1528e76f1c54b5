"""Targets about trust: signatures, key files, and the note by which a scrub goes on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st

from neuron_store.artifact import Artifact, ArtifactFile, dump_record, load_record
from neuron_store.errors import ArtifactUntrusted, ConfigError, InvalidRecord
from neuron_store.scrub_progress import ScrubProgress
from neuron_store.signing import PublicKey, Signer, _pem, read_key_file, statement
from neuron_store.trust import TrustPolicy
from tests.fuzz.guarding import SECRET
from tests.fuzz.target import Target, must

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["TRUST_TARGETS"]

KEY = "0123456789abcdef0123456789abcdef"
WHERE = "s3://bucket/prefix"


def _signer(name: bytes) -> Signer:
    """Of no use but here: everybody can compute it."""
    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name).digest())
    return Signer(PublicKey(private.public_key().public_bytes_raw()), private)


# -- signatures ------------------------------------------------------------------------


def _artifact(**facts: object) -> Artifact:
    files = (ArtifactFile("graph.hlo", 9, "1" * 64), ArtifactFile("a/b.neff", 1024, "2" * 64))
    given = {"created": "2026-08-06T20:37:11+00:00", "write_id": "f" * 32, **facts}
    return Artifact(KEY, files, **given)  # type: ignore[arg-type]


@functools.cache
def _signed() -> Sequence[Artifact]:
    ours, other = _signer(b"ours"), _signer(b"other")
    plain = _artifact(executable="a/b.neff", components={"flags": "-O2"}, host={"os": "linux"})
    return [ours.sign(plain), ours.sign(other.sign(_artifact(compiler="iree"))), other.sign(plain)]


def _records() -> list[bytes]:
    return [dump_record(artifact) for artifact in _signed()]


@functools.cache
def _said() -> frozenset[bytes]:
    """Everything that the trusted key ever signed."""
    return frozenset(map(statement, _signed()[:2]))


def _signatures(data: bytes, _root: Path) -> object:
    """No change to what was signed is taken, and no other refusal is raised than the one."""
    artifact, inline = load_record(data, key=KEY, source=WHERE)
    strict = TrustPolicy([_signer(b"ours").public], required=True)
    verdict = strict.judge(artifact)
    str(verdict)
    try:
        strict.accept(artifact, WHERE)
    except ArtifactUntrusted as error:
        must(verdict.outcome != "trusted", f"refused though trusted: {error}")
    else:
        must(statement(artifact) in _said(), "trusted what nobody signed")
    again, _ = load_record(dump_record(artifact, inline), key=KEY, source=WHERE)
    must(strict.judge(again) == verdict, "another verdict after a copy")
    return verdict.outcome, len(artifact.signatures)


# -- key files -------------------------------------------------------------------------


def _public_keys(data: bytes, root: Path) -> object:
    root.mkdir(exist_ok=True)
    path = root / "team.pub"
    path.write_bytes(data)
    os.chmod(path, 0o644)
    keys = read_key_file(str(path), what="NEURON_STORE_TRUSTED_KEYS")
    for key in keys:
        must(re.fullmatch(r"[0-9a-f]{32}", key.id) is not None, f"id {key.id!r}")
        must(PublicKey.parse(str(key), what="test") == key, "a key that does not read back")
    return len(keys)


def _private_pems() -> list[bytes]:
    pem = _pem(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"pem").digest()))
    noted = f"Comment: {SECRET}\n".encode() + pem
    torn = pem.replace(b"\n-----END", SECRET.encode() + b"\n-----END")
    return [pem, noted, torn, pem.replace(b"PRIVATE", b"ENCRYPTED PRIVATE")]


def _private_key(data: bytes, root: Path) -> object:
    root.mkdir(exist_ok=True)
    path = root / "key.pem"
    path.write_bytes(data)
    os.chmod(path, 0o600)
    signer = Signer.load(str(path), what="NEURON_STORE_SIGNING_KEY")
    told = repr(signer)
    must("BEGIN" not in told and SECRET not in told, "a private key in a repr")
    signed = signer.sign(_artifact())
    trusted = TrustPolicy([signer.public], required=True).judge(signed).outcome
    must(trusted == "trusted", "its own signature does not fit")
    return True


# -- a scrub's note --------------------------------------------------------------------


def _line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


_NOTE = _line(neuron_store_verify=1) + _line(tier=WHERE, key=KEY, outcome="damaged")
_NOTES = [_NOTE, _NOTE + _line(tier=WHERE, key=KEY, outcome="ok"), _NOTE[:-9], _NOTE[:24]]


def _scrub_progress(data: bytes, root: Path) -> object:
    """What is no note stays as it is; in a note, what is said from here on is not lost."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    path = root / "note.jsonl"
    path.write_bytes(data)
    try:
        progress = ScrubProgress.resume(str(path))
    except ConfigError:
        must(path.read_bytes() == data, "a file that is no note was written to")
        raise
    known = progress.is_done(WHERE, KEY), progress.is_damaged(WHERE, KEY)
    must(not all(known), "both done and damaged")
    must((KEY in progress.damaged(WHERE)) is known[1], "two answers about damage")
    progress.say("elsewhere", KEY, "repaired")
    progress.close()
    again = ScrubProgress.resume(str(path))
    told = again.is_done(WHERE, KEY), again.is_damaged(WHERE, KEY)
    must(told == known and again.is_done("elsewhere", KEY), "a note that forgets")
    again.finish()
    if not path.exists():
        must(not told[1], "word of a repair without an end is gone")
        return known
    left = ScrubProgress.resume(str(path))
    must(left.is_damaged(WHERE, KEY) is told[1], "word of a repair without an end is another")
    must(not left.is_done_anywhere(KEY), "a note that stays with what is done")
    left.close()
    return known


TRUST_TARGETS: tuple[Target, ...] = (
    Target(
        "signed_record",
        _signatures,
        (InvalidRecord,),
        _records,
        (b'"signatures": ', b'"key_id": ', b'"scheme": ', b"-v1", b"-v2"),
    ),
    Target(
        "public_keys",
        _public_keys,
        (ConfigError,),
        lambda: [f"{_signer(b'ours').public}\n# a note\n{_signer(b'other').public}".encode()],
        (b"ed25519:", b"#", b"=", b"\r\n", b"ssh-ed25519 "),
        strategy=st.text("ed25519:AB+/=#\n ", max_size=90).map(str.encode),
    ),
    Target(
        "private_key",
        _private_key,
        (ConfigError,),
        _private_pems,
        (b"-----BEGIN PRIVATE KEY-----\n", b"-----END PRIVATE KEY-----", b"PUBLIC", b"RSA "),
        secret=lambda data: SECRET.encode() in data,
    ),
    Target(
        "scrub_progress",
        _scrub_progress,
        (ConfigError,),
        lambda: _NOTES,
        (b'"outcome": ', b'"damaged"', b'"repaired"', b'{"neuron_store_verify": 1}\n', b"\n"),
    ),
)
