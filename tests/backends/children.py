"""What the tests' child processes run. A module of its own, so that `spawn` finds it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from neuron_store import steps

if TYPE_CHECKING:
    from pathlib import Path

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact


def publish_rounds(
    store: ArtifactStore, rounds: list[tuple[Artifact, Path]], barrier: Any, answers: Any
) -> None:
    """Publish each artifact when all other processes do."""
    told = []
    for artifact, source in rounds:
        barrier.wait(60)
        try:
            told.append(store.publish(artifact, source).name)
        except BaseException as error:
            told.append(repr(error))
    answers.put(told)


def publish_and_die(
    store: ArtifactStore, artifact: Artifact, source: Path, where: str, how: str
) -> None:
    """Publish, and end without any clean-up when the step `where` begins."""

    def hook(name: str) -> None:
        if name == where:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(77)

    steps.set_hook(hook)
    store.publish(artifact, source)
    os._exit(0)


def find_and_fetch(store: ArtifactStore, key: str, into: Path, answers: Any) -> None:
    """Use a store that the parent used before."""
    try:
        artifact = store.fetch(key, into)
        answers.put(("ok", artifact.size, sorted(store.keys())))
    except BaseException as error:
        answers.put(("error", repr(error), []))
