"""When a request to an object store is sent again, after what pause, and when it is given up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from neuron_store_backends._trouble import Changed, Kind, Missing, backoff, refusal

if TYPE_CHECKING:
    from neuron_store_backends._objects import Objects

__all__ = ["Attempts"]

_log = logging.getLogger(__name__)


class Attempts:
    """The tries of one request, for a loop that waits by sleeping or by awaiting.

    Args:
        objects: classifies errors and forgets an expired handle.
        operation: for messages.
        key: for messages.
        seconds: what all tries together may take; None: no limit of its own.
        most: tries at most, whatever the trouble.
    """

    def __init__(
        self,
        objects: Objects,
        operation: str,
        *,
        key: str | None = None,
        seconds: float | None,
        most: int = 100,
    ) -> None:
        self._objects = objects
        self._operation = operation
        self._key = key
        self._most = most
        self._tried = 0
        self._again = dict.fromkeys(Kind, 0)
        self._rebuilt = False
        self.end = None if seconds is None else time.monotonic() + seconds
        """By the monotonic clock."""

    @property
    def left(self) -> float | None:
        """Seconds until the deadline; None where there is none."""
        return None if self.end is None else self.end - time.monotonic()

    def failed(self, error: Exception) -> float:
        """What to wait, in seconds, before the next try.

        Raises:
            Missing: the object is not there.
            Changed: the precondition did not hold.
            TierError: another try would not help, or there is no time for one.
        """
        self._tried += 1
        trouble = self._objects.classify(error)
        if trouble.kind is Kind.MISSING:
            raise Missing from error
        if trouble.kind is Kind.PRECONDITION:
            raise Changed from error
        if trouble.kind is Kind.EXPIRED and not self._rebuilt:
            self._rebuilt = True
            self._objects.forget()
            return 0.0
        self._again[trouble.kind] += 1
        pause = backoff(self._again[trouble.kind])
        late = self.end is not None and time.monotonic() + pause >= self.end
        if self._again[trouble.kind] > trouble.retries or late or self._tried >= self._most:
            raise refusal(
                trouble, self._objects.location, self._operation, key=self._key, tries=self._tried
            ) from error
        _log.debug(
            "%s at %s: %s; again in %.2f s",
            self._operation,
            self._objects.location,
            trouble,
            pause,
        )
        return pause
