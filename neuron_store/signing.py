"""Ed25519 signatures over what a record says of its artifact.

Signed is a statement: one line that names its form, then the facts as canonical JSON. It holds the
key, every file's size and digest, what the key was computed from and who compiled it; so it stands
for the bytes, wherever they lie. It leaves out what differs from copy to copy: the write id, which
each publish draws anew, the small files that an object tier keeps inside the record (their digests
are in), the form in which a tier stores a file, and the signatures themselves. So a signature
outlives a fetch and a promotion elsewhere.

The package `cryptography` (extra `sign`) is imported at the first signature and not before.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.artifact import MAX_SIGNATURES, Signature
from neuron_store.errors import ArtifactUntrusted, ConfigError, InvalidArtifact, MissingExtra
from neuron_store.streams import create_file, open_regular, write_all
from neuron_store.tier_url import require_file_name, shown

if TYPE_CHECKING:
    from neuron_store.artifact import Artifact

__all__ = [
    "SCHEME",
    "PublicKey",
    "Signer",
    "create_key",
    "list_key_files",
    "merge_signatures",
    "read_key_file",
    "require_cryptography",
    "same_statement",
    "statement",
]

SCHEME = "neuron_store-ed25519-v1"
_HEADER = b"neuron_store artifact statement v1\n"
_PREFIX = "ed25519:"
_MAX_KEY_FILE = 1 << 16


def statement(artifact: Artifact) -> bytes:
    """The bytes that are signed: the same for every copy of an artifact, different for any other.

    Raises:
        ArtifactUntrusted: a file has no digest, or the facts are no plain JSON.
    """
    if not artifact.has_digests:
        raise ArtifactUntrusted(
            artifact.key,
            "its record",
            "a file has no digest, so that a signature would not stand for its bytes",
        )
    facts = {
        "key": artifact.key,
        "created": artifact.created,
        "executable": artifact.executable,
        "compiler": artifact.compiler,
        "compiler_version": artifact.compiler_version,
        "components": dict(artifact.components),
        "host": dict(artifact.host),
        "files": sorted([f.name, f.size, f.sha256] for f in artifact.files),
    }
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactUntrusted(
            artifact.key, "its record", f"its facts cannot be signed ({error})"
        ) from None
    return _HEADER + text.encode("ascii")


def same_statement(one: Artifact, other: Artifact) -> bool:
    """Whether a signature of the one is a signature of the other."""
    try:
        return statement(one) == statement(other)
    except ArtifactUntrusted:
        return False


def merge_signatures(artifact: Artifact, *more: Signature) -> Artifact:
    """The artifact with further signatures; of two by one key and scheme, the later stays.

    Beyond `MAX_SIGNATURES` the first ones go.
    """
    by_key = {(s.key_id, s.scheme): s for s in artifact.signatures}
    for signature in more:
        # To the end, where it stays when there are too many: anybody may have filled the record.
        by_key.pop((signature.key_id, signature.scheme), None)
        by_key[signature.key_id, signature.scheme] = signature
    return attrs.evolve(artifact, signatures=tuple(by_key.values())[-MAX_SIGNATURES:])


@attrs.frozen
class PublicKey:
    """An Ed25519 public key, written `ed25519:` and base64."""

    raw: bytes = attrs.field(repr=False)

    @property
    def id(self) -> str:
        """32 hex digits, by which a signature says whose it is."""
        return hashlib.sha256(self.raw).hexdigest()[:32]

    def __str__(self) -> str:
        return _PREFIX + base64.b64encode(self.raw).decode("ascii")

    @classmethod
    def parse(cls, text: str, *, what: str) -> PublicKey:
        """Read one; `what` names its place in errors.

        Raises:
            ConfigError: it is none.
        """
        try:
            raw = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
        except (ValueError, binascii.Error):
            raw = b""
        if not text.startswith(_PREFIX) or len(raw) != 32:
            raise ConfigError(
                f"{what}: {shown(text, 80)} is no public key; write ed25519:BASE64, "
                "as `neuron-store keygen` prints it"
            )
        return cls(raw)

    def verifies(self, signature: Signature, data: bytes) -> bool:
        """Whether the signature is this key's, over `data`.

        Raises:
            MissingExtra: the extra `sign` is not installed.
        """
        if signature.scheme != SCHEME or signature.key_id != self.id:
            return False
        try:
            value = base64.b64decode(signature.signature, validate=True)
        except (ValueError, binascii.Error):
            return False
        key, invalid = _loaded(self.raw)
        try:
            key.verify(value, data)
        except invalid:
            return False
        return True


@functools.lru_cache(maxsize=64)
def _loaded(raw: bytes) -> tuple[Any, type[Exception]]:
    ed25519 = require_cryptography()
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  (an extra)

    return ed25519.Ed25519PublicKey.from_public_bytes(raw), InvalidSignature


@attrs.frozen
class Signer:
    """A private key, to sign with. Its text never holds the secret."""

    public: PublicKey
    _private: Any = attrs.field(repr=False, eq=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, what: str) -> Signer:
        """Read a private key file: PEM, PKCS #8, not encrypted, as `keygen` and OpenSSL write it.

        Args:
            path: of the file.
            what: the option or variable that named it, for errors.

        Raises:
            ConfigError: it cannot be read, others may read it, or it holds no Ed25519 key.
            MissingExtra: the extra `sign` is not installed.
        """
        ed25519 = require_cryptography()
        from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415  (an extra)
            load_pem_private_key,
        )

        require_file_name(os.fspath(path), what=what)
        place = f"{what}={os.fspath(path)}"
        data = _read_private(os.path.expanduser(path), place)
        try:
            private = load_pem_private_key(data, password=None)
        except TypeError:
            raise ConfigError(
                f"{place}: the key is encrypted; give one without a passphrase, "
                "such as `neuron-store keygen` makes"
            ) from None
        except Exception:  # noqa: BLE001  (its many errors may quote the file)
            raise ConfigError(f"{place}: not a private key in PEM") from None
        if not isinstance(private, ed25519.Ed25519PrivateKey):
            raise ConfigError(f"{place}: not an Ed25519 key; `neuron-store keygen` makes one")
        return cls(PublicKey(private.public_key().public_bytes_raw()), private)

    def sign(self, artifact: Artifact) -> Artifact:
        """The artifact with this key's signature beside those that it has.

        Raises:
            ArtifactUntrusted: it has files without digests, or facts that are no plain JSON.
        """
        value = base64.b64encode(self._private.sign(statement(artifact))).decode("ascii")
        return merge_signatures(artifact, Signature(self.public.id, value, SCHEME))


def create_key(path: str | os.PathLike[str]) -> PublicKey:
    """Make a key pair: the private key in the new file `path` (0600), the public in `path`.pub.

    The private key appears under its name whole or not at all.

    Raises:
        ConfigError: one of the files exists (nothing is overwritten) or cannot be written.
        MissingExtra: the extra `sign` is not installed.
    """
    ed25519 = require_cryptography()
    private = ed25519.Ed25519PrivateKey.generate()
    text = os.path.expanduser(os.fspath(path))
    if text.endswith(os.sep) or os.path.isdir(text):
        raise ConfigError(f"{text} names a directory; name a new file for the private key")
    target = os.path.abspath(text)
    public = PublicKey(private.public_key().public_bytes_raw())
    try:
        for taken in (target, f"{target}.pub"):
            if os.path.lexists(taken):
                raise ConfigError(f"{taken} exists, and no key is overwritten; name another file")
        _write_private(target, _pem(private))
        descriptor = create_file(f"{target}.pub")
        try:
            # Whatever the umask: who may write it could put another key there.
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o644)
            write_all(descriptor, f"{public}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename} exists; nothing overwritten"
        ) from None
    except OSError as error:
        # Not by the draft's name, which nobody knows.
        raise ConfigError(f"{target}: {error.strerror or error}") from error
    return public


def _write_private(target: str, pem: bytes) -> None:
    draft = f"{target}.{os.getpid()}.new"
    descriptor = os.open(
        draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        try:
            write_all(descriptor, pem)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # A link and not a rename: that would replace what somebody else puts there now.
        os.link(draft, target)
    finally:
        os.unlink(draft)


def _pem(private: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415  (an extra)
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    pem: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _read_private(path: str, place: str) -> bytes:
    try:
        # Not `open_regular`: where a secret is mounted (Kubernetes), its name is a link.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}; `neuron-store keygen` makes a key") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{place}: not a file")
        data = os.read(descriptor, _MAX_KEY_FILE)
        if data.startswith(_PREFIX.encode()) or b"BEGIN PUBLIC KEY" in data:
            raise ConfigError(f"{place}: this is a public key; name the private key's file")
        # OpenSSH's rule: what others gave this user to read is theirs to protect.
        if b"PRIVATE KEY" in data and found.st_uid == os.getuid() and found.st_mode & 0o077:
            raise ConfigError(
                f"{place}: others may read it (mode {stat.S_IMODE(found.st_mode):o}); "
                f"run: chmod 600 {path}"
            )
        return data
    finally:
        os.close(descriptor)


def list_key_files(path: str, *, what: str) -> list[str]:
    """The paths of a directory's `*.pub`, sorted.

    Raises:
        ConfigError: it cannot be read; or somebody else owns it, or may add a file to it.
    """
    place = f"{what}: {path}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_ours(descriptor, path, place)
            names = os.listdir(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    return [f"{path}/{name}" for name in sorted(names) if name.endswith(".pub")]


def _require_ours(descriptor: int, path: str, place: str) -> None:
    """Refuse what somebody besides this user and root could put a key into."""
    found = os.fstat(descriptor)
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(
            f"{place} belongs to uid {found.st_uid}, who could add a key; "
            "let it belong to this user or to root"
        )
    # Kubernetes mounts keys read-only, in a directory of mode 0777. Elsewhere the sticky bit does
    # not keep others from adding a file.
    if found.st_mode & 0o022 and not os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{place} can be written by others, who could add a key; run: chmod go-w {path}"
        )


def read_key_file(path: str, *, what: str) -> list[PublicKey]:
    """The public keys of a file: one a line, whatever follows on it is a comment.

    Raises:
        ConfigError: it cannot be read, others own or may write it, or a line is no key.
    """
    place = f"{what}: {path}"
    try:
        descriptor = open_regular(os.path.realpath(path, strict=True))
    except InvalidArtifact as error:
        raise ConfigError(f"{place}: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: {getattr(error, 'strerror', None) or error}") from None
    try:
        _require_ours(descriptor, path, place)
        lines = os.read(descriptor, _MAX_KEY_FILE).decode("utf-8", "replace").splitlines()
    finally:
        os.close(descriptor)
    texts = [line.split()[0] for line in lines if line.strip()]
    return [PublicKey.parse(t, what=place) for t in texts if not t.startswith("#")]


def require_cryptography() -> Any:
    """The module of Ed25519 keys.

    Raises:
        MissingExtra: the extra `sign` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise MissingExtra("signing and checking signatures", "sign", "cryptography") from error
    return ed25519
