"""Publishing a local artifact in shared tiers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import attrs

from neuron_store.abc import Publication
from neuron_store.errors import (
    ArtifactNotFound,
    ConfigError,
    NeuronStoreError,
    PromoteError,
    ReadOnlyTier,
    TierError,
)
from neuron_store.readonly import ReadOnlyStore
from neuron_store.trust import require_signed, require_vouched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.signing import Signer
    from neuron_store.tier_health import TierHealth
    from neuron_store.trust import TrustPolicy

__all__ = ["promote_to", "promotion_targets"]

_log = logging.getLogger(__name__)


def promote_to(
    local: ArtifactStore,
    targets: Sequence[ArtifactStore],
    healths: Mapping[str, TierHealth],
    key: str,
    *,
    signer: Signer | None,
    trust: TrustPolicy,
    in_passing: bool = False,
) -> Mapping[str, Publication]:
    """Publish one artifact in each tier; see `TieredStore.promote` and `promote_in_passing`."""
    path, artifact = local.locate(key) or (None, None)
    if artifact is None or not artifact.has_digests:
        # An entry of the Neuron stack without digests of its own: what its loader would trip
        # over is no gift to a fleet. Also says why an entry that looks complete is none.
        artifact = local.verify(key)
    if path is None:
        raise ArtifactNotFound(key, local.location)
    if signer is not None:
        require_vouched(artifact, signer, trust, local.location)
        artifact = signer.sign(artifact)
    artifact = attrs.evolve(artifact, fetched_from=None)
    done: dict[str, Publication] = {}
    failures: dict[str, NeuronStoreError] = {}
    for tier in targets:
        health, began = healths[tier.name], time.monotonic()
        if in_passing and (reason := health.resting()):
            _log.debug("%s: %s not promoted: %s", tier.location, key, reason)
            continue
        try:
            answer = tier.publish(artifact, path)
            if signer is not None:
                require_signed(tier, artifact, signer, answer)
        except NeuronStoreError as error:
            _count(health, error, time.monotonic() - began, in_passing=in_passing)
            failures[tier.name] = error
            continue
        done[tier.name] = answer
        written = answer in {Publication.CREATED, Publication.REPAIRED}
        health.count(size=artifact.size if written else 0, seconds=time.monotonic() - began)
        if answer is Publication.CONFLICT:
            _log.warning(
                "%s: %s is there with other content than the local artifact; it stays",
                tier.location,
                key,
            )
    if failures:
        raise PromoteError(key, failures, done)
    return done


def _count(health: TierHealth, error: NeuronStoreError, spent: float, *, in_passing: bool) -> None:
    if in_passing and isinstance(error, TierError):
        health.failed(error, spent)
    else:
        health.count(error=1, seconds=spent)


def promotion_targets(
    shared: Sequence[ArtifactStore], to: str | Sequence[str] | None
) -> Sequence[ArtifactStore]:
    """The tiers that a promotion goes to.

    Raises:
        ConfigError: there is no such tier, or no shared tier at all.
        ReadOnlyTier: none was named, and all are read-only.
    """
    if not shared:
        raise ConfigError(
            "there is no shared tier to promote to; set NEURON_STORE_TIERS or "
            "NEURON_LIBTORCH_REMOTE_CACHE"
        )
    if to is None:
        targets = [tier for tier in shared if not isinstance(tier, ReadOnlyStore)]
        if not targets:
            raise ReadOnlyTier(shared[0].location, "promote")
        return targets
    targets = []
    for wanted in [to] if isinstance(to, str) else to:
        matching = [t for t in shared if wanted in {t.name, t.location}]
        if not matching:
            known = ", ".join(t.name for t in shared)
            raise ConfigError(f"no shared tier is called {wanted!r}; there are: {known}")
        targets += matching
    return targets
