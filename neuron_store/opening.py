"""Opening the store that the settings describe, and the two functions of the Neuron stack."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_store.abc import ArtifactStore, Publication
from neuron_store.artifact import check_key
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactIncomplete,
    ArtifactNotFound,
    ConfigError,
)
from neuron_store.registry import open_tier
from neuron_store.settings import compile_cache_dir, load_settings
from neuron_store.tier_url import TierURL
from neuron_store.tiered import TieredStore
from neuron_store.trust import load_signer
from neuron_store.variables import Sources

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["get_neuron_compile_cache_dir", "open_store", "save_cache"]

Tier = str | os.PathLike[str] | TierURL | ArtifactStore


def open_store(
    tiers: Tier | Sequence[Tier] | None = None,
    *,
    local: str | os.PathLike[str] | None = None,
) -> TieredStore:
    """The local tier, and over it the shared ones.

    Args:
        tiers: URLs, paths or open tiers instead of those in the settings.
        local: the local tier's root instead of the one in the settings.

    Raises:
        ConfigError: a setting or a URL cannot be used.
    """
    settings = load_settings()
    root = settings.local_root if local is None else _directory(local, "local")
    wanted: Sequence[Tier]
    if tiers is None:
        wanted = settings.tiers
    elif isinstance(tiers, (str, os.PathLike, TierURL, ArtifactStore)):
        wanted = [tiers]
    else:
        wanted = tiers
    settings.trust.check_local_root(root)
    return TieredStore(
        [open_tier(TierURL("local", str(root))), *(_open(tier) for tier in wanted)],
        deadline=settings.tier_deadline,
        lock_timeout=settings.policy.timeout,
        trust=settings.trust,
        signer=load_signer(Sources.load()),
        verify=settings.verify,
    )


def _open(tier: Tier) -> ArtifactStore:
    if isinstance(tier, ArtifactStore):
        return tier
    return open_tier(tier if isinstance(tier, TierURL) else os.fspath(tier))


def get_neuron_compile_cache_dir() -> str:
    """The local tier's directory. Respects VLLM_CACHE_ROOT; below /tmp when home is on NFS.

    Raises:
        ConfigError: the directory below /tmp is not safely this user's own.
    """
    return str(compile_cache_dir(Sources.load()))


def save_cache(
    local_cache_dir: str | os.PathLike[str],
    remote_cache_dir: str | os.PathLike[str],
    hash_key: str,
) -> Publication:
    """Promote one entry of a local compile cache to a shared directory, or to a URL.

    Copies to a staging directory beside the target, then renames. Safe from several nodes at
    once: when another was first, nothing happens.

    Returns:
        CREATED, PRESENT (another was first), CONFLICT (another was first, with other bytes; its
        bytes stay) or REPAIRED.

    Raises:
        ArtifactIncomplete: (a RuntimeError) the local entry is not complete.
        PromoteError: (a RuntimeError) the shared side could not be written; names key and tier.
        ConfigError: the URL cannot be used.
    """
    check_key(hash_key)
    root = _directory(local_cache_dir, "local_cache_dir")
    remote = _remote(remote_cache_dir)
    with open_tier(TierURL("local", str(root))) as local:
        try:
            if local.locate(hash_key) is None:
                local.verify(hash_key)  # raises, and says what is wrong with it
        except ArtifactCorrupt as error:
            raise ArtifactIncomplete(hash_key, str(root / hash_key), error.reason) from error
        except ArtifactNotFound as error:
            there = (root / hash_key).is_dir()
            reason = "some of its files are missing" if there else "there is no such entry"
            raise ArtifactIncomplete(hash_key, str(root / hash_key), reason) from error
        if os.path.realpath(remote) == os.path.realpath(root):
            return Publication.PRESENT
        signer = load_signer(Sources.load())
        with _open(remote) as tier, TieredStore([local, tier], signer=signer) as store:
            answers = store.promote(hash_key)
            return answers[tier.name]


def _directory(path: str | os.PathLike[str], what: str) -> Path:
    # An unset variable must not mean the current directory.
    if not os.fspath(path).strip():
        raise ConfigError(f"{what} is empty; give the directory's path")
    return Path(path).expanduser().absolute()


def _remote(remote: str | os.PathLike[str]) -> str:
    text = os.fspath(remote)
    _directory(remote, "remote_cache_dir")
    return text if "://" in text or text.startswith("~") else os.path.abspath(text)
