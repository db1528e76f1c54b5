"""Whose word for an artifact this process takes, and what becomes of artifacts without it.

Checked is what comes from a shared tier: the record's signature first, then the bytes by the
record's digests. What lies in the local tier was compiled here, or was checked when it came; it is
as trustworthy as whoever may write to its directory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import stat
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from neuron_store.abc import Publication
from neuron_store.errors import (
    ArtifactNotFound,
    ArtifactUntrusted,
    ConfigError,
    MissingExtra,
    Unsupported,
)
from neuron_store.readonly import ReadOnlyStore
from neuron_store.signing import SCHEME, PublicKey, Signer, list_key_files, read_key_file, statement
from neuron_store.tier_url import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact
    from neuron_store.variables import Sources

__all__ = [
    "TrustPolicy",
    "TrustingReader",
    "Verdict",
    "load_signer",
    "require_signed",
    "require_vouched",
]

_log = logging.getLogger(__name__)

_TRUSTED = "NEURON_STORE_TRUSTED_KEYS"
_REQUIRED = "NEURON_STORE_REQUIRE_SIGNATURE"
_SIGNING = "NEURON_STORE_SIGNING_KEY"


@attrs.frozen
class Verdict:
    """What an artifact's signatures are worth."""

    outcome: str
    """`trusted`; `bad` (it claims a trusted key, and is not that key's); `unknown` (by keys that
    are not trusted here); `unsigned`."""
    signer: str | None = None
    """The id of the trusted key."""
    detail: str = ""

    def __str__(self) -> str:
        return f"signed by {self.signer}" if self.signer is not None else self.detail


class TrustPolicy:
    """Trusted keys, and whether a signature by one of them is required. Thread-safe.

    Without `required`, an artifact that nobody signed is taken, and a wrong signature by a trusted
    key still refused.
    """

    def __init__(self, keys: Sequence[PublicKey] = (), *, required: bool = False) -> None:
        self._keys: Mapping[str, PublicKey] = {key.id: key for key in keys}
        self.required = required
        self._told: set[str] = set()
        self._lock = threading.Lock()

    @property
    def keys(self) -> Sequence[PublicKey]:
        """The trusted keys."""
        return tuple(self._keys.values())

    @property
    def active(self) -> bool:
        """Whether anything is checked at all."""
        return bool(self._keys) or self.required

    @classmethod
    def from_sources(cls, sources: Sources) -> TrustPolicy:
        """What environment and settings file say.

        Raises:
            ConfigError: a key cannot be read, or a signature is required and no key trusted.
            MissingExtra: signatures are to be checked, and the extra `sign` is not installed.
        """
        required: bool = sources.read(_REQUIRED)[0]
        keys = [key for entry in sources.read(_TRUSTED)[0] for key in _trusted(entry)]
        if required and not keys:
            raise ConfigError(
                f"{_REQUIRED} is set and {_TRUSTED} names no key, so that nothing could be used; "
                f"set {_TRUSTED} to the public keys of those who promote"
            )
        # Now and not at the first fetch, where it would pass for a tier's trouble.
        if keys and importlib.util.find_spec("cryptography") is None:
            raise MissingExtra(_TRUSTED, "sign", "cryptography")
        return cls(keys, required=required)

    def judge(self, artifact: Artifact) -> Verdict:
        """What the signatures of a record are worth here."""
        if not artifact.signatures:
            return Verdict("unsigned", detail="it is not signed")
        try:
            data = statement(artifact)
        except ArtifactUntrusted as error:
            return Verdict("bad", detail=error.reason)
        claimed = []
        for signature in artifact.signatures:
            key = self._keys.get(signature.key_id)
            if key is None or signature.scheme != SCHEME:
                continue
            if key.verifies(signature, data):
                return Verdict("trusted", key.id)
            claimed.append(key.id)
        if claimed:
            return Verdict("bad", detail=f"its signature by {claimed[0]} does not fit the record")
        ids = ", ".join(dict.fromkeys(s.key_id for s in artifact.signatures))
        return Verdict("unknown", detail=f"it is signed by {ids}, whom {_TRUSTED} does not name")

    def accept(self, artifact: Artifact, location: str) -> None:
        """Let an artifact of a shared tier pass.

        Raises:
            ArtifactUntrusted: it must not be used.
        """
        if not self.active:
            return
        verdict = self.judge(artifact)
        if verdict.outcome == "bad" or (self.required and verdict.outcome != "trusted"):
            raise ArtifactUntrusted(artifact.key, location, verdict.detail)
        if verdict.outcome != "trusted":
            self._tell(
                f"accepted {location}",
                f"artifact {artifact.key} at {location} is taken without a trusted signature "
                f"({verdict.detail}), since {_REQUIRED} is not set",
                logging.INFO,
            )

    def gate(self, location: str) -> Callable[[Artifact], None]:
        """`accept` for one tier."""
        return lambda artifact: self.accept(artifact, location)

    def reader(self, tier: ArtifactStore) -> ArtifactStore:
        """A shared tier without what is not trusted, for reading."""
        return TrustingReader(tier, self) if self.active else tier

    def report(self, refusal: ArtifactUntrusted) -> None:
        """Log a refusal: the first of each tier as a warning, the others for who looks closer."""
        self._tell(f"refused {refusal.location}", str(refusal), logging.WARNING)

    def _tell(self, topic: str, text: str, level: int) -> None:
        with self._lock:
            first = topic not in self._told
            self._told.add(topic)
        _log.log(level if first else logging.DEBUG, "%s", text)

    def check_local_root(self, root: str | os.PathLike[str]) -> None:
        """Refuse a local tier into which anybody may put artifacts, where signatures count.

        One that is not there is made: later somebody else could, or a umask of 0 would open it.

        Raises:
            ConfigError: a signature is required, and the directory is somebody else's (and not
                root's), or writable by all.
        """
        if not self.required:
            return
        try:
            _make_closed(root)
            found = os.stat(root)
        except OSError:
            return
        remedy = f"with {_REQUIRED} the local tier must be a directory of this user's own"
        if found.st_uid not in {os.getuid(), 0}:
            raise ConfigError(
                f"{root} belongs to uid {found.st_uid}, who could plant artifacts; "
                f"{remedy}; set VLLM_CACHE_ROOT"
            )
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(f"{root} is writable by all; {remedy}; run: chmod o-w {root}")


def _make_closed(root: str | os.PathLike[str]) -> None:
    missing, path = [], os.path.abspath(root)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o755)
        except FileExistsError:
            pass  # whoever it was, the root is looked at


class TrustingReader(ReadOnlyStore):
    """A shared tier as those may see it who read: what is not trusted raises `ArtifactUntrusted`.

    A stream is not checked against the digests that were signed, so it is not opened; fetch.
    """

    def __init__(self, inner: ArtifactStore, trust: TrustPolicy) -> None:
        super().__init__(inner)
        self._accept = trust.gate(inner.location)

    def find(self, key: str) -> Artifact | None:
        artifact = self.inner.find(key)
        if artifact is not None:
            self._accept(artifact)
        return artifact

    def fetch(self, key: str, into: Path) -> Artifact:
        return self.inner.fetch_accepted(key, into, self._accept)

    def verify(self, key: str) -> Artifact:
        # The signature first: what nobody vouches for need not be read.
        self.find(key)
        artifact = self.inner.verify(key)
        self._accept(artifact)
        return artifact

    def open_file(self, key: str, name: str) -> BinaryIO:
        raise Unsupported("open_file", type(self).__name__, f"fetch {key} to read its {name}")


def _trusted(entry: str) -> Sequence[PublicKey]:
    """The keys that one entry of NEURON_STORE_TRUSTED_KEYS says: a key, a file, or a directory."""
    if entry.startswith("ed25519:"):
        return [PublicKey.parse(entry, what=_TRUSTED)]
    path = os.path.expanduser(entry)
    if not os.path.isabs(path):
        raise ConfigError(
            f"{_TRUSTED}: {shown(entry, 80)} is neither a key (ed25519:BASE64) nor an absolute path"
        )
    if not os.path.isdir(path):
        return read_key_file(path, what=_TRUSTED)
    files = list_key_files(path, what=_TRUSTED)
    return [key for file in files for key in read_key_file(file, what=_TRUSTED)]


def load_signer(sources: Sources) -> Signer | None:
    """The key that promotions of this process are signed with; None: they are not.

    Raises:
        ConfigError: the file cannot be used.
        MissingExtra: the extra `sign` is not installed.
    """
    path: Any = sources.read(_SIGNING)[0]
    return None if path is None else Signer.load(path, what=_SIGNING)


def require_vouched(artifact: Artifact, signer: Signer, trust: TrustPolicy, location: str) -> None:
    """See that signing an artifact would not make somebody else's work this key's.

    What was compiled here may be signed. What was fetched may come from anybody who can write to
    the shared tier, unless a trusted key, or this one, has signed it already.

    Raises:
        ArtifactUntrusted: nobody trusted vouches for it yet.
    """
    if artifact.fetched_from is None:
        return
    verdict = TrustPolicy([*trust.keys, signer.public]).judge(artifact)
    if verdict.outcome != "trusted":
        raise ArtifactUntrusted(
            artifact.key,
            location,
            f"it was not made here but fetched from {artifact.fetched_from}, and {verdict.detail}",
            remedy="a signature would vouch for whoever wrote it there; delete it here and compile "
            f"it with {_REQUIRED}=1, or name its signer in {_TRUSTED}",
        )


def require_signed(
    tier: ArtifactStore, artifact: Artifact, signer: Signer, answer: Publication
) -> None:
    """See that what a signed publish met, or left, carries the signer's signature.

    An entry that was there before keeps its record. Where that says the same as ours, the
    signature is added to it; a record that says anything else is not ours to vouch for.

    Raises:
        ArtifactUntrusted: the tier has another record, which the signer's key did not sign.
        ArtifactNotFound: the entry vanished again.
        TierError: the tier could not be read or written.
        Unsupported: the tier cannot add signatures.
    """
    if answer is Publication.CREATED:
        return
    there = tier.find(artifact.key)
    if there is None:
        raise ArtifactNotFound(artifact.key, tier.location)
    if TrustPolicy([signer.public]).judge(there).outcome == "trusted":
        return
    if tier.endorse(artifact):
        return
    raise ArtifactUntrusted(
        artifact.key,
        tier.location,
        "it was there before, with a record that differs from the local one and is not signed by "
        f"{signer.public.id}",
        remedy="find out whose it is; delete it there, and promote again",
    )
