"""Every error that neuron_store raises.

All derive from [`NeuronStoreError`][] and from the nearest builtin, so that code which knows only
the builtin keeps working. Facts are attributes, the message is built from them, and instances
survive pickling (a rank sends its error to rank 0).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.abc import Publication, TierAnswer

__all__ = [
    "ArtifactCorrupt",
    "ArtifactIncomplete",
    "ArtifactMismatch",
    "ArtifactNotFound",
    "ArtifactUntrusted",
    "CacheMiss",
    "CollectorBusy",
    "CompileError",
    "CompileTimeout",
    "ConfigError",
    "HloError",
    "HostUnfit",
    "InvalidArtifact",
    "InvalidKey",
    "InvalidRecord",
    "LeaseHeld",
    "LockTimeout",
    "ManifestError",
    "MissingExtra",
    "NeuronStoreError",
    "PromoteError",
    "ReadOnlyTier",
    "TierError",
    "TierUnfit",
    "TiersUnavailable",
    "Unkeyable",
    "UnknownScheme",
    "Unsupported",
    "UnsupportedOperator",
]


def _rebuild(cls: type[NeuronStoreError], message: str, state: dict[str, Any]) -> NeuronStoreError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class NeuronStoreError(Exception):
    """Base of all errors of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class InvalidKey(NeuronStoreError, ValueError):
    """A key that is not one safe path component; nothing was built from it."""

    def __init__(self, key: object) -> None:
        self.key = key if isinstance(key, str) else repr(key)
        shown = self.key if len(self.key) <= 80 else self.key[:77] + "..."
        super().__init__(
            f"invalid key {shown!r}: a key is one path component of 1 to 200 characters, "
            "[A-Za-z0-9][A-Za-z0-9._+=-]*; use the 32 hex digits that the compiler's job computed"
        )


class InvalidRecord(NeuronStoreError, ValueError):
    """An artifact record that cannot be trusted or read."""

    def __init__(self, reason: str, *, source: str | None = None, newer: bool = False) -> None:
        self.reason = reason
        self.source = source
        self.newer = newer
        """A newer release wrote it: it may be fine, and this one cannot judge it."""
        where = f" in {source}" if source else ""
        super().__init__(f"artifact record{where}: {reason}")


class InvalidArtifact(NeuronStoreError, ValueError):
    """A directory that cannot become an artifact (a symlink, a device, no file at all)."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class HloError(NeuronStoreError, ValueError):
    """Bytes that are not a readable HLO module, or one beyond the reader's bounds."""


class ManifestError(NeuronStoreError, ValueError):
    """A manifest that cannot be read; the message names the file and each fault."""

    def __init__(self, reason: str, *, source: str | None = None) -> None:
        self.reason = reason
        self.source = source
        super().__init__(f"manifest{f' {source}' if source else ''}: {reason}")


class ConfigError(NeuronStoreError, ValueError):
    """A setting that cannot be used; the message names the setting, its value and the remedy."""


class UnknownScheme(ConfigError):
    """No installed package serves this URL scheme."""

    def __init__(self, scheme: str, known: Sequence[str], remedy: str = "") -> None:
        self.scheme = scheme
        self.known = tuple(known)
        hint = remedy or "install the package that provides it, or use one of the known schemes"
        super().__init__(
            f"no tier for scheme {scheme!r}; known: {', '.join(self.known) or 'none'}; {hint}"
        )


class MissingExtra(ConfigError, ImportError):
    """A part of neuron_store whose optional dependency is not installed."""

    def __init__(self, what: str, extra: str, missing: str) -> None:
        self.what = what
        self.extra = extra
        self.missing = missing
        super().__init__(
            f"{what} needs {missing}, which is not installed; "
            f"run: pip install 'neuron-store[{extra}]'"
        )


class TierError(NeuronStoreError, OSError):
    """A tier did not answer, or answered with trouble. Never a miss."""

    def __init__(
        self,
        location: str,
        operation: str,
        reason: str,
        *,
        key: str | None = None,
        code: int | None = None,
    ) -> None:
        self.location = location
        self.operation = operation
        self.reason = reason
        self.key = key
        subject = f" {key}" if key else ""
        super().__init__(f"{operation}{subject} at {location}: {reason}")
        # OSError fills errno only from two positional arguments, which would change args.
        self.errno = code if code is not None else errno.EIO

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), {**self.__dict__, "errno": self.errno})


class ReadOnlyTier(TierError):
    """A write to a tier that was opened with read_only=1."""

    def __init__(self, location: str, operation: str, *, key: str | None = None) -> None:
        super().__init__(
            location,
            operation,
            "the tier is configured read-only; drop read_only from its URL to write to it",
            key=key,
            code=errno.EROFS,
        )


class TierUnfit(TierError):
    """A tier that cannot keep the promises of an artifact store, found by measuring it."""


class TiersUnavailable(TierError):
    """No tier had the artifact, and at least one could not say. `answers` has each one's word."""

    def __init__(self, key: str, answers: Sequence[TierAnswer]) -> None:
        self.answers = tuple(answers)
        super().__init__(
            "the tiers", "get", "; ".join(str(answer) for answer in self.answers), key=key
        )


class ArtifactNotFound(NeuronStoreError, LookupError):
    """Every tier that was asked answered, and none has a complete artifact under the key."""

    def __init__(self, key: str, location: str, answers: Sequence[TierAnswer] = ()) -> None:
        self.key = key
        self.location = location
        self.answers = tuple(answers)
        said = "; ".join(str(answer) for answer in self.answers)
        super().__init__(f"no artifact {key} at {location}" + (f" ({said})" if said else ""))


class ArtifactCorrupt(NeuronStoreError, ValueError):
    """An artifact whose bytes are not the ones its record names."""

    def __init__(self, key: str, location: str, reason: str) -> None:
        self.key = key
        self.location = location
        self.reason = reason
        super().__init__(
            f"artifact {key} at {location} is damaged: {reason}; "
            "it is not used; promote a good copy, or compile again, to repair it"
        )


class ArtifactUntrusted(NeuronStoreError, ValueError):
    """An artifact that nobody vouches for whom this process trusts. It may be whole."""

    def __init__(self, key: str, location: str, reason: str, *, remedy: str = "") -> None:
        self.key = key
        self.location = location
        self.reason = reason
        super().__init__(
            f"artifact {key} at {location} is refused: {reason}; "
            + (
                remedy
                or "it is not used, and stays where it is; promote it with --sign and a key whose "
                "public half is in NEURON_STORE_TRUSTED_KEYS"
            )
        )


class ArtifactIncomplete(NeuronStoreError, RuntimeError):
    """A local entry that is not complete and so cannot be promoted."""

    def __init__(self, key: str, path: str, reason: str) -> None:
        self.key = key
        self.path = path
        self.reason = reason
        super().__init__(
            f"Cannot save cache: local entry is incomplete at {path} ({reason}). "
            "Ensure compilation has completed successfully before calling save_cache()."
        )


class ArtifactMismatch(NeuronStoreError, RuntimeError):
    """An artifact whose recorded key components are not the caller's: refused, not loaded."""

    def __init__(self, key: str, location: str, differences: Mapping[str, tuple[Any, Any]]) -> None:
        self.key = key
        self.location = location
        self.differences = dict(differences)
        told = "; ".join(
            f"{name}: stored {stored!r}, wanted {wanted!r}"
            for name, (stored, wanted) in sorted(self.differences.items())
        )
        super().__init__(
            f"artifact {key} at {location} was made for something else ({told}); "
            "the key misses a component: add it to the job's components, or remove the entry"
        )


class HostUnfit(NeuronStoreError, RuntimeError):
    """An artifact that this machine cannot run: another processor, a feature it lacks."""

    def __init__(self, key: str, location: str, needs: str, remedy: str) -> None:
        self.key = key
        self.location = location
        self.needs = needs
        super().__init__(
            f"artifact {key} at {location} cannot run on this host: it needs {needs}; {remedy}"
        )


class Unsupported(NeuronStoreError, NotImplementedError):
    """An operation that this kind of tier does not have."""

    def __init__(self, operation: str, implementer: str, reason: str = "") -> None:
        self.operation = operation
        self.implementer = implementer
        super().__init__(f"{implementer} has no {operation}" + (f": {reason}" if reason else ""))


class Unkeyable(NeuronStoreError, TypeError):
    """A graph that holds something whose meaning a key cannot carry from one process to another.

    Nothing is wrong with the graph; it is compiled without the cache.
    """

    def __init__(self, what: str, reason: str, remedy: str = "") -> None:
        self.what = what
        self.reason = reason
        self.remedy = remedy
        super().__init__(
            f"{what} cannot be part of a key: {reason}; "
            + (remedy or "the graph is compiled without the cache")
        )


class UnsupportedOperator(NeuronStoreError, NotImplementedError):
    """An operator, or one form of it, that the lowering does not have."""

    def __init__(self, operator: str, reason: str = "") -> None:
        self.operator = operator
        self.reason = reason
        super().__init__(
            f"no lowering for {operator}"
            + (f": {reason}" if reason else "")
            + "; docs/torch.md lists what there is, and the graph runs eagerly unless "
            'options={"fallback": "error"}'
        )


class LockTimeout(NeuronStoreError, TimeoutError):
    """A key's lock was not free in time."""

    def __init__(self, key: str, path: str, seconds: float, holder: str | None = None) -> None:
        self.key = key
        self.path = path
        self.seconds = seconds
        self.holder = holder
        super().__init__(
            f"lock of {key} not acquired in {seconds:g} s ({path}); held by {holder or 'unknown'}"
        )


class LeaseHeld(NeuronStoreError):
    """Somebody else in the fleet holds the lease, or held it less than a ttl ago."""

    def __init__(
        self,
        key: str,
        location: str,
        holder: str,
        *,
        host: str | None = None,
        renewed: bool = False,
        ttl: float = 0.0,
    ) -> None:
        self.key = key
        self.location = location
        self.holder = holder
        """For messages, such as `pid 4711`."""
        self.host = host
        """The holder's own name for its machine; None when unknown."""
        self.renewed = renewed
        """Whether this process, asking before, saw another version of it: its holder lives."""
        self.ttl = ttl
        """Seconds within which the holder promised to renew it; 0 when unknown."""
        where = f" on {host}" if host else ""
        super().__init__(f"lease of {key} at {location} is held by {holder}{where}")


class CollectorBusy(NeuronStoreError):
    """Another process collects the tier's garbage right now; one at a time does."""

    def __init__(self, location: str, holder: str) -> None:
        self.location = location
        self.holder = holder
        super().__init__(
            f"another collector is at work at {location}: {holder}; let it finish, then try again"
        )


class CompileError(NeuronStoreError, RuntimeError):
    """A compile failed for good; every process that waited for it gets an equal one.

    `log_tail` holds the compiler's last lines. `permanent` says that trying the same input again
    cannot help (a missing compiler, a flag that does not exist).
    """

    def __init__(
        self,
        key: str,
        reason: str,
        *,
        compiler: str | None = None,
        status: int | None = None,
        log_tail: str = "",
        permanent: bool = False,
    ) -> None:
        self.key = key
        self.reason = reason
        self.compiler = compiler
        self.status = status
        self.log_tail = log_tail
        self.permanent = permanent
        who = f"{compiler}: " if compiler else ""
        tail = f"\n--- last lines of the compiler ---\n{log_tail}" if log_tail else ""
        super().__init__(f"compile of {key} failed: {who}{reason}{tail}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash((self.key, self.reason))


class CompileTimeout(NeuronStoreError, TimeoutError):
    """Waited too long for another process's compile; it may still finish, and will be used."""

    def __init__(
        self, key: str, seconds: float, *, holder: str, host: str, age: float | None
    ) -> None:
        self.key = key
        self.seconds = seconds
        self.holder = holder
        self.host = host
        self.age = age
        running = f", compiling for {age:.0f} s" if age is not None else ""
        super().__init__(
            f"waited {seconds:g} s for the compile of {key} by {holder} on {host}{running}; "
            "raise NEURON_LIBTORCH_COMPILATION_TIMEOUT if it is still at work"
        )


class CacheMiss(NeuronStoreError, RuntimeError):
    """Compiling is forbidden here and no tier has the artifact."""

    def __init__(self, key: str, answers: Sequence[TierAnswer]) -> None:
        self.key = key
        self.answers = tuple(answers)
        said = "; ".join(str(answer) for answer in self.answers) or "no tier is configured"
        super().__init__(
            f"VLLM_NEURON_DISABLE_WARMUP_COMPILE: compile cache miss for key {key} ({said}). "
            "All graphs must be pre-compiled when warmup compilation is disabled: promote it from "
            "a node that has it, or unset the variable."
        )


class PromoteError(NeuronStoreError, RuntimeError):
    """An artifact did not reach every tier it was meant for. `done` has those it did reach."""

    def __init__(
        self,
        key: str,
        failures: Mapping[str, NeuronStoreError],
        done: Mapping[str, Publication],
    ) -> None:
        self.key = key
        self.failures = dict(failures)
        self.done = dict(done)
        failed = "; ".join(f"{tier}: {error}" for tier, error in self.failures.items())
        reached = ", ".join(f"{tier} ({value.name})" for tier, value in self.done.items())
        super().__init__(
            f"promote of {key} failed for {failed}" + (f"; reached {reached}" if reached else "")
        )


def fetch_outcome(error: NeuronStoreError) -> str:
    """What a `get` that failed says of the artifact: `missing`, `corrupt`, `refused` or `error`."""
    if isinstance(error, ArtifactNotFound):
        # A damaged copy is not used, so for the store it is none; here it is the thing to mend.
        said = {answer.outcome for answer in error.answers}
        return next((word for word in ("corrupt", "refused") if word in said), "missing")
    return "corrupt" if isinstance(error, ArtifactCorrupt) else "error"
