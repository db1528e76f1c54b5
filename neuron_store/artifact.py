"""Keys, artifact records and the names that may appear in them.

A record is plain JSON (never pickle), versioned, and is not trusted: whatever it says is checked
here before any path is built from it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store._strict_json import load_json
from neuron_store.errors import InvalidKey, InvalidRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BUNDLE",
    "MAX_RECORD_BYTES",
    "RECORD_NAME",
    "RECORD_VERSION",
    "Artifact",
    "ArtifactFile",
    "Signature",
    "StoredForm",
    "check_artifact",
    "check_file_name",
    "check_key",
    "dump_record",
    "is_key",
    "load_record",
    "new_write_id",
]

RECORD_NAME = ".neuron_store.json"
RECORD_VERSION = 1
ENCODED_VERSION = 2
"""Of a record that says in which form a file is stored. Older releases would look for the file
itself, and call it lost; so they must refuse the record, and it alone."""
BUNDLE = "bundle"
"""The encoding of files that lie in one object, one after the other."""
_BUNDLE_NAME = ".neuron_store.bundle"
"""Of that object; no file of an artifact can have it."""
MAX_RECORD_BYTES = 16 << 20
"""A larger record is refused unread: it comes from a shared tier and would fill the memory."""
MAX_FILES = 10_000
MAX_SIGNATURES = 16
"""More in one record are not looked at: each costs its reader a verification."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}\Z")
_COMPONENT = re.compile(r"[A-Za-z0-9._+=@,~-]{1,200}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WRITE_ID = re.compile(r"[0-9a-f]{32}\Z")
_ENCODING = re.compile(r"[a-z0-9][a-z0-9+._-]{0,39}\Z")
_SIGNATURE_TEXT = re.compile(r"[A-Za-z0-9+/=._:-]{1,200}\Z")

# The completion mark holds the time of the compile; two compiles with equal results differ in it.
_VOLATILE = frozenset({".compilation_complete"})


def is_key(key: object) -> bool:
    """Whether `key` is one safe path component."""
    return isinstance(key, str) and _KEY.match(key) is not None


def check_key(key: str) -> str:
    """Return `key`, or raise `InvalidKey` before any path is built from it."""
    if not is_key(key):
        raise InvalidKey(key)
    return key


def check_file_name(name: object) -> str:
    """Return `name`, a relative POSIX path inside an artifact, or raise `InvalidRecord`.

    Refused: absolute paths, `.` and `..`, empty components, back-slashes, control characters, and
    the names that neuron_store keeps for itself.
    """
    if not isinstance(name, str) or len(name) > 1000:
        raise InvalidRecord(f"{str(name)[:80]!r} is not a file name")
    parts = name.split("/")
    if (
        len(parts) > 16
        or any(p in {".", ".."} or _COMPONENT.match(p) is None for p in parts)
        or parts[0].startswith(".neuron_store")
    ):
        raise InvalidRecord(f"unsafe file name {name[:200]!r}; nothing was written")
    return name


def check_artifact(artifact: Artifact) -> Artifact:
    """Return `artifact`, or raise `InvalidKey` or `InvalidRecord`.

    Its key or a name is unsafe, or it has more files than a record may name.
    """
    check_key(artifact.key)
    if len(artifact.files) > MAX_FILES:
        raise InvalidRecord(
            f"artifact {artifact.key} has {len(artifact.files)} files, and a key may have "
            f"{MAX_FILES}; pack them into fewer"
        )
    for file in artifact.files:
        check_file_name(file.name)
    return artifact


def new_write_id() -> str:
    """A random id by which a writer recognises its own record after a lost reply."""
    return uuid.uuid4().hex


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


@attrs.frozen
class StoredForm:
    """The bytes that stand for a file in one tier, where they are not the file's own."""

    encoding: str
    """How they were made: `zstd`, one frame; `bundle`, the bytes of all files that have this form,
    in the record's order. Readers refuse what they do not know."""
    size: int
    """Bytes there."""
    sha256: str
    """Hex, of the bytes there; for a bundle, of lines "name size sha256" of its files, in order."""


@attrs.frozen
class ArtifactFile:
    """One file of an artifact."""

    name: str
    """Relative POSIX path."""
    size: int
    """Bytes."""
    sha256: str | None = None
    """Hex; None for an entry of the Neuron stack, which records none, until it is copied."""
    stored: StoredForm | None = attrs.field(default=None, eq=False)
    """How it lies in the tier that the record is of; None: as it is. No part of what it is."""

    @property
    def at_rest(self) -> ArtifactFile:
        """What lies in the tier: the object's name, and size and digest of its stored form."""
        form = self.stored
        if form is None:
            return self
        name = _BUNDLE_NAME if form.encoding == BUNDLE else self.name
        return ArtifactFile(name, form.size, form.sha256)


@attrs.frozen
class Signature:
    """Somebody's word for a record; `neuron_store.signing` makes and checks it."""

    key_id: str
    """Of the public key that it claims to be by."""
    signature: str
    """Base64."""
    scheme: str
    """What was signed, and how."""


@attrs.frozen
class Artifact:
    """What we know of an artifact. Immutable once published."""

    key: str
    files: tuple[ArtifactFile, ...]
    created: str = attrs.field(factory=_utc_now)
    """ISO 8601, UTC: when it was compiled."""
    executable: str | None = None
    """The name of the compiled program among `files`."""
    compiler: str | None = None
    compiler_version: str | None = None
    components: Mapping[str, Any] = attrs.field(factory=dict)
    """What the key was computed from, as JSON values."""
    host: Mapping[str, str] = attrs.field(factory=dict)
    """Facts about the machine that compiled it."""
    write_id: str = attrs.field(factory=new_write_id, eq=False)
    """Random for each publish; tells a writer's own record from another's."""
    signatures: tuple[Signature, ...] = attrs.field(default=(), eq=False)
    """Not part of what they are about."""
    fetched_from: str | None = attrs.field(default=None, eq=False)
    """In a local tier: the shared tier that this copy came from. None: made here."""

    @property
    def compiled(self) -> str | None:
        """`created`, or None where nobody knew it: a time of zero is what archives leave."""
        return None if self.created.startswith("1970-01-01T00:00:00") else self.created

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(f.size for f in self.files)

    @property
    def stored_size(self) -> int:
        """Bytes that all files together take in the tier that the record is of."""
        return sum(lies.size for lies in {f.at_rest for f in self.files})

    def without_forms(self) -> Artifact:
        """The same artifact, freed of what holds for one tier only."""
        if all(f.stored is None for f in self.files):
            return self
        return attrs.evolve(self, files=tuple(attrs.evolve(f, stored=None) for f in self.files))

    def file(self, name: str) -> ArtifactFile | None:
        """The file of that name, if the artifact has one."""
        return next((f for f in self.files if f.name == name), None)

    @property
    def has_digests(self) -> bool:
        """Whether every file's digest is known."""
        return all(f.sha256 is not None for f in self.files)

    def same_bytes(self, other: Artifact) -> bool:
        """Whether both hold the same files, the completion mark's time set aside.

        Both must have all digests.
        """

        def content(artifact: Artifact) -> set[tuple[str, int, str | None]]:
            return {(f.name, f.size, f.sha256) for f in artifact.files if f.name not in _VOLATILE}

        return content(self) == content(other)


def dump_record(artifact: Artifact, inline: Mapping[str, bytes] | None = None) -> bytes:
    """The record as JSON. `inline` are small files that travel inside it."""
    encoded = any(f.stored is not None for f in artifact.files)
    record: dict[str, Any] = {
        "neuron_store_record": ENCODED_VERSION if encoded else RECORD_VERSION,
        "key": artifact.key,
        "write_id": artifact.write_id,
        "created": artifact.created,
        "executable": artifact.executable,
        "compiler": artifact.compiler,
        "compiler_version": artifact.compiler_version,
        "components": dict(artifact.components),
        "host": dict(artifact.host),
        "files": [_file_entry(f) for f in artifact.files],
    }
    if artifact.signatures:
        # Older releases of this version pass over the field.
        record["signatures"] = [
            {"key_id": s.key_id, "scheme": s.scheme, "signature": s.signature}
            for s in artifact.signatures
        ]
    if artifact.fetched_from is not None:
        record["fetched_from"] = artifact.fetched_from
    if inline:
        record["inline"] = {
            name: base64.b64encode(data).decode("ascii") for name, data in inline.items()
        }
    # Without `indent`: with it, the standard library encodes in Python, 20 times slower.
    return json.dumps(record, sort_keys=True).encode()


def _file_entry(file: ArtifactFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": file.name, "size": file.size, "sha256": file.sha256}
    if file.stored is not None:
        entry["stored"] = attrs.asdict(file.stored)
    return entry


def load_record(data: bytes, *, key: str, source: str) -> tuple[Artifact, Mapping[str, bytes]]:
    """Parse a record that must be the one of `key`; returns it with its in-line files.

    Raises:
        InvalidRecord: not JSON, not ours, another key's, another version's, or naming unsafe files.
    """
    try:
        artifact, inline = _parse(data)
    except InvalidRecord as error:
        raise InvalidRecord(error.reason, source=source, newer=error.newer) from None
    if artifact.key != key:
        raise InvalidRecord(f"it is the record of {artifact.key}, not of {key}", source=source)
    return artifact, inline


# A pure function of the bytes, so that a process which hits the same artifact again skips the
# parsing; the bytes themselves are read from the tier every time.
@functools.lru_cache(maxsize=256)
def _parse(data: bytes) -> tuple[Artifact, Mapping[str, bytes]]:
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRecord(f"{len(data)} bytes; at most {MAX_RECORD_BYTES} are read")
    try:
        raw = load_json(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"not JSON ({error})") from None
    if not isinstance(raw, dict) or "neuron_store_record" not in raw:
        raise InvalidRecord("not a record of neuron_store")
    version = raw["neuron_store_record"]
    if type(version) is not int or not RECORD_VERSION <= version <= ENCODED_VERSION:
        raise InvalidRecord(
            newer=type(version) is int and version > ENCODED_VERSION,
            reason=f"version {version!r}; this release reads {RECORD_VERSION} and "
            f"{ENCODED_VERSION}: upgrade neuron-store",
        )
    return _structure(raw)


def _structure(raw: dict[str, Any]) -> tuple[Artifact, Mapping[str, bytes]]:
    # By hand and not by cattrs: this runs at every first hit of a process, where importing cattrs
    # alone would cost more than the whole hit, and every field has a rule of its own anyway.
    key = _text(raw, "key")
    if not is_key(key):
        raise InvalidRecord(f"unsafe key {key[:200]!r}")
    write_id = _text(raw, "write_id")
    if _WRITE_ID.match(write_id) is None:
        raise InvalidRecord("write_id is not 32 hex digits")
    created = _text(raw, "created")
    try:
        datetime.fromisoformat(created)
    except ValueError:
        raise InvalidRecord(f"created is not a time: {created[:80]!r}") from None
    components, host = raw.get("components", {}), raw.get("host", {})
    if not isinstance(components, dict):
        raise InvalidRecord("components is not an object")
    if not isinstance(host, dict) or not all(isinstance(v, str) for v in host.values()):
        raise InvalidRecord("host is not an object of strings")
    files = _files(raw.get("files"), encoded=raw["neuron_store_record"] >= ENCODED_VERSION)
    names = {f.name for f in files}
    executable = _text(raw, "executable", optional=True)
    if executable is not None and executable not in names:
        raise InvalidRecord(f"executable {executable[:200]!r} is not among its files")
    artifact = Artifact(
        key=key,
        files=files,
        created=created,
        executable=executable,
        compiler=_text(raw, "compiler", optional=True),
        compiler_version=_text(raw, "compiler_version", optional=True),
        components=components,
        host=host,
        write_id=write_id,
        signatures=_signatures(raw.get("signatures")),
        fetched_from=_text(raw, "fetched_from", optional=True),
    )
    return artifact, _inline(raw.get("inline", {}), files)


def _signatures(raw: object) -> tuple[Signature, ...]:
    """Those that have the form of one. What has not vouches for nothing; nor does it damage."""
    found: dict[Signature, None] = {}
    for entry in raw[:MAX_SIGNATURES] if isinstance(raw, list) else ():
        if not isinstance(entry, dict):
            continue
        texts = [str(entry.get(name, "")) for name in ("key_id", "signature", "scheme")]
        if all(_SIGNATURE_TEXT.match(text) is not None for text in texts):
            found[Signature(*texts)] = None
    return tuple(found)


def _text(raw: dict[str, Any], name: str, *, optional: bool = False) -> Any:
    value = raw.get(name)
    if isinstance(value, str) or (optional and value is None):
        return value
    raise InvalidRecord(f"{name} is not a string")


def _files(raw: object, *, encoded: bool) -> tuple[ArtifactFile, ...]:
    if not isinstance(raw, list) or not raw or len(raw) > MAX_FILES:
        raise InvalidRecord(f"files is not a list of 1 to {MAX_FILES} entries")
    files = []
    for entry in raw:
        if not isinstance(entry, dict):
            raise InvalidRecord("an entry of files is not an object")
        name, size, sha256 = (
            check_file_name(entry.get("name")),
            entry.get("size"),
            entry.get("sha256"),
        )
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise InvalidRecord(f"size of {name!r} is not a count of bytes: {size!r:.40}")
        if sha256 is not None and (not isinstance(sha256, str) or _SHA256.match(sha256) is None):
            raise InvalidRecord(f"sha256 of {name!r} is not 64 hex digits")
        # Version 1 does not know the field, and passes over it as its own releases do.
        form = _form(entry["stored"], name) if encoded and "stored" in entry else None
        files.append(ArtifactFile(name, size, sha256, form))
    names = {f.name for f in files}
    if len(names) != len(files):
        raise InvalidRecord("a file is named twice")
    # `a` and `a/b` cannot both be files; the second would fail half-way through a fetch.
    if any("/".join(n.split("/")[:i]) in names for n in names for i in range(1, n.count("/") + 1)):
        raise InvalidRecord("a file is named as another one's folder")
    return tuple(files)


def _form(raw: object, name: str) -> StoredForm:
    facts = raw if isinstance(raw, dict) else {}
    encoding, size, sha256 = (facts.get(fact) for fact in ("encoding", "size", "sha256"))
    if (
        not isinstance(encoding, str)
        or _ENCODING.match(encoding) is None
        or type(size) is not int
        or size < 0
        or not isinstance(sha256, str)
        or _SHA256.match(sha256) is None
    ):
        raise InvalidRecord(f"stored form of {name!r} is not an encoding, a size and a digest")
    return StoredForm(encoding, size, sha256)


def _inline(raw: object, files: tuple[ArtifactFile, ...]) -> Mapping[str, bytes]:
    if not isinstance(raw, dict):
        raise InvalidRecord("inline is not an object")
    sizes = {f.name: f.size for f in files}
    inline: dict[str, bytes] = {}
    for name, text in raw.items():
        try:
            data = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise InvalidRecord(f"in-line file {name[:200]!r} is not base64") from None
        if sizes.get(name) != len(data):
            raise InvalidRecord(f"in-line file {name[:200]!r} is not the size that files says")
        inline[name] = data
    return inline
