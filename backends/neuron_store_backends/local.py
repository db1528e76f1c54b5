"""The node's own tier: a directory on a local disk, with the locks and the scratch space."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_store.abc import Publication
from neuron_store.artifact import check_key
from neuron_store.errors import LockTimeout, TierError
from neuron_store.locks import FileKeyLock
from neuron_store_backends._modes import make_container
from neuron_store_backends._uses import Uses
from neuron_store_backends.renaming import RenamingStore

if TYPE_CHECKING:
    import os

    from neuron_store.abc import KeyLock
    from neuron_store.artifact import Artifact
    from neuron_store.collector import Collector

__all__ = ["LocalStore"]

_log = logging.getLogger(__name__)


class LocalStore(RenamingStore):
    """The local tier.

    The Neuron stack compiles in place, in `<root>/<key>/`, holding the key's lock. So a publish
    here takes that lock too, lest it rename a directory that is being filled away.
    """

    scheme = "local"
    lock_timeout = 600.0
    """Seconds that a publish waits for somebody who holds the key's lock."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__(root, name=name, read_only=read_only)
        self.uses = Uses(self._root)

    def locate(self, key: str) -> tuple[Path, Artifact] | None:
        found = super().locate(key)
        if found is not None and self.uses.note(key):
            # A collector is at work; what it has not hidden by now it leaves alone.
            found = super().locate(key)
        return found

    def fetch(self, key: str, into: Path) -> Artifact:
        artifact = super().fetch(key, into)
        self.uses.note(key)
        return artifact

    def collector(self) -> Collector:
        from neuron_store_backends._collecting_local import LocalCollector  # noqa: PLC0415  (gc only)

        return LocalCollector(self)

    def close(self) -> None:
        self.uses.flush()

    def lock(self, key: str, timeout: float) -> KeyLock:
        return FileKeyLock(self._root, key, timeout)

    def scratch(self, key: str) -> Path:
        path = Path(self._root, ".staging", f"{check_key(key)}.{uuid.uuid4().hex}")
        with self._trouble("scratch", key):
            make_container(self._root, ".staging")
            # Not 0700: a publish renames it into place, and its mode stays.
            path.mkdir()
        return path

    def set_aside(self, key: str) -> bool:
        # Without a record it may be a directory that the Neuron stack is filling right now.
        lock = self.lock(key, self.lock_timeout)
        try:
            if not lock.try_acquire():
                return False
        except TierError as error:
            _log.debug("setting %s aside without its lock: %s", key, error)
            return super().set_aside(key)
        try:
            return super().set_aside(key)
        finally:
            lock.release()

    def publish(self, artifact: Artifact, source: Path, *, consume: bool = False) -> Publication:
        lock = self.lock(artifact.key, self.lock_timeout)
        deadline, pause = time.monotonic() + self.lock_timeout, 0.005
        while True:
            try:
                if lock.try_acquire():
                    break
            except TierError as error:
                # No flock on this file system: the rename alone keeps the data right.
                _log.debug("publishing %s without its lock: %s", artifact.key, error)
                return super().publish(artifact, source, consume=consume)
            with self._trouble("publish", artifact.key):
                judged = self._judge(artifact, source)
            if judged in {Publication.PRESENT, Publication.CONFLICT}:
                return judged
            if time.monotonic() > deadline:
                raise LockTimeout(
                    artifact.key, self.location, self.lock_timeout, str(lock.holder() or "unknown")
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        try:
            return super().publish(artifact, source, consume=consume)
        finally:
            lock.release()
