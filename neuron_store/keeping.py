"""Publishing what was just made, so that no trouble with the store costs it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import ArtifactCorrupt, TierError

if TYPE_CHECKING:
    from pathlib import Path

    from neuron_store.abc import ArtifactStore, Publication
    from neuron_store.artifact import Artifact

__all__ = ["Kept", "publish_or_keep"]

_log = logging.getLogger(__name__)


@attrs.frozen
class Kept:
    """Where the artifact is now."""

    path: Path
    answer: Publication | None
    """What the publish said; None when it failed."""
    in_scratch: bool = False
    """It lies where it was made, unpublished: the directory must stay."""


def publish_or_keep(store: ArtifactStore, artifact: Artifact, scratch: Path) -> Kept:
    """Publish the directory `scratch`, which the store may take over, and tell where it is then.

    Where that fails (a full disk), the artifact is used where it lies: a result of an hour's work
    is not lost for want of a place. A publish may also fail after its rename, the directory being
    in place already and no longer where it was made.

    Raises:
        TierError: the artifact is in neither place.
    """
    answer = None
    try:
        answer = store.publish(artifact, scratch, consume=True)
    except TierError as error:
        if all(os.path.isfile(scratch / file.name) for file in artifact.files):
            _log.warning("%s; using the copy in %s, unpublished", error, scratch)
            return Kept(scratch, None, in_scratch=True)
        _log.warning("%s; it is in place all the same", error)
    try:
        path = store.path_of(artifact.key)
    except ArtifactCorrupt as error:
        # Found damaged, and not to be moved: the publish met it and left it there.
        _log.warning("%s", error)
        path = None
    if path is not None:
        return Kept(path, answer)
    if all(os.path.isfile(scratch / file.name) for file in artifact.files):
        return Kept(scratch, answer, in_scratch=True)
    raise TierError(store.location, "publish", "the artifact vanished again", key=artifact.key)
