"""Why a key is missing: what each tier answers, and what the nearest stored artifact differs in.

Records are looked up, never artifacts fetched. A key is a digest and says nothing of itself; what
it was computed from is known from a record in any tier, or from the caller. Keys of libneuronxla
(`MODULE_<graph>+<flags>`) name two components themselves.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.abc import TierAnswer
from neuron_store.artifact import check_key
from neuron_store.asking import Trouble, ask
from neuron_store.pooling import each

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.artifact import Artifact

__all__ = ["Difference", "Explanation", "Near", "compare", "explain"]

RECORDS = 1000
"""Records that are read to find the nearest artifact, if the caller does not say."""
_LOOKS_AT_ONCE = 16
_MODULE = re.compile(r"MODULE_([^+]+)\+([^+]+)\Z")


@attrs.frozen
class Difference:
    """One component that is not the same."""

    name: str
    before: tuple[Any, ...]
    """The value asked for, alone in a tuple; empty where there is no such component."""
    after: tuple[Any, ...]
    """The stored artifact's."""

    def plain(self) -> dict[str, Any]:
        """As JSON values; a side that has no such component is left out."""
        sides = zip(("before", "after"), (self.before, self.after), strict=True)
        return {"name": self.name, **{side: value[0] for side, value in sides if value}}


@attrs.frozen
class Near:
    """A stored artifact, and what tells it from the one that was asked for."""

    key: str
    location: str
    """Of the first tier that has it."""
    created: str
    differences: tuple[Difference, ...]


@attrs.frozen
class Explanation:
    """What can be said of one key."""

    key: str
    tiers: tuple[TierAnswer, ...]
    components: Mapping[str, Any] | None
    """What the key stands for; None where nobody knows."""
    nearest: Near | None = None
    """None when the key is there, or when nothing stored is near."""
    records: int = 0
    """Records that were read to find it."""
    more: bool = False
    """Whether there were more, which were not read."""

    @property
    def found(self) -> bool:
        """Whether a tier has the artifact."""
        return any(answer.outcome == "hit" for answer in self.tiers)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Difference, ...]:
    """The components that differ, by name. As in keys, `1`, `1.0`, `true` and `"1"` are four."""
    return tuple(
        Difference(
            name,
            (before[name],) if name in before else (),
            (after[name],) if name in after else (),
        )
        for name in sorted({*before, *after})
        if name not in before or name not in after or _text(before[name]) != _text(after[name])
    )


def explain(
    key: str,
    tiers: Sequence[ArtifactStore],
    *,
    components: Mapping[str, Any] | None = None,
    seconds: float = 30.0,
    records: int = RECORDS,
) -> Explanation:
    """Ask every tier for `key`; when none has it, find the nearest artifact that is stored.

    Near is an artifact that differs in one component, or in less than half of them. Of several, one
    with the same `graph` comes first, then the one that differs least, then the youngest.

    Args:
        key: the artifact's.
        tiers: where to look, the local one first.
        components: what the key was computed from; None: what a record says.
        seconds: that one question to a tier may take.
        records: how many are read at most; 0: do not look for the nearest.

    Raises:
        InvalidKey: before any tier is asked.
    """
    check_key(key)
    looks = list(
        each(functools.partial(_look, key=key, seconds=seconds), tiers, workers=_LOOKS_AT_ONCE)
    )
    answers = tuple(answer for answer, _ in looks)
    known = components
    if known is None:
        recorded = (_components(artifact) for _, artifact in looks if artifact is not None)
        known = next((c for c in recorded if c), None) or _named_by(key)
    told = Explanation(key, answers, known)
    if told.found or not known or not records:
        return told
    # A tier that did not answer one question need not be asked a thousand.
    able = [t for t, answer in zip(tiers, answers, strict=True) if answer.outcome != "error"]
    candidates = _keys(able, key, records + 1, seconds)
    found = each(
        lambda item: (item[1], _look(item[1], key=item[0], seconds=seconds)[1]),
        candidates[:records],
        workers=_LOOKS_AT_ONCE,
    )
    nearest = _nearest(known, found)
    read = min(len(candidates), records)
    return attrs.evolve(told, nearest=nearest, records=read, more=len(candidates) > records)


def _look(tier: ArtifactStore, *, key: str, seconds: float) -> tuple[TierAnswer, Artifact | None]:
    answer = ask(tier.location, functools.partial(tier.find, key), seconds=seconds)
    if isinstance(answer, Trouble):
        return TierAnswer(tier.location, answer.outcome, answer.detail), None
    return TierAnswer(tier.location, "miss" if answer is None else "hit"), answer


def _keys(
    tiers: Iterable[ArtifactStore], but: str, limit: int, seconds: float
) -> list[tuple[str, ArtifactStore]]:
    """Keys other than `but`, each with the first tier that lists it, at most `limit`."""
    found: dict[str, ArtifactStore] = {}
    for tier in tiers:
        call = functools.partial(_fresh, tier, {but, *found}, limit - len(found))
        keys = ask(tier.location, call, seconds=seconds)
        if not isinstance(keys, Trouble):
            found |= dict.fromkeys(keys, tier)
    return list(found.items())


def _fresh(tier: ArtifactStore, known: set[str], limit: int) -> list[str]:
    listed = tier.keys()
    return list(itertools.islice((key for key in listed if key not in known), limit))


def _nearest(
    known: Mapping[str, Any], found: Iterable[tuple[ArtifactStore, Artifact | None]]
) -> Near | None:
    ranked = []
    for tier, artifact in found:
        theirs = {} if artifact is None else _components(artifact)
        if artifact is None or not theirs:
            continue
        differences = compare(known, theirs)
        count, names = len(differences), len({*known, *theirs})
        if count == names or (count > 1 and 2 * count >= names):
            continue
        graph = any(d.name == "graph" for d in differences)
        near = Near(artifact.key, tier.location, artifact.created, differences)
        ranked.append((graph, count, near))
    # Sorted by one criterion after the other, the last one first: the youngest must come first.
    ranked.sort(key=lambda entry: (entry[2].created, entry[2].key), reverse=True)
    ranked.sort(key=lambda entry: entry[:2])
    return ranked[0][2] if ranked else None


def _components(artifact: Artifact) -> Mapping[str, Any]:
    return artifact.components or _named_by(artifact.key) or {}


def _named_by(key: str) -> Mapping[str, Any] | None:
    parts = _MODULE.match(key)
    return None if parts is None else {"graph": parts[1], "compiler_flags": parts[2]}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
