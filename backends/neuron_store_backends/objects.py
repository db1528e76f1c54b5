"""What a third party needs to write a tier by conditional create. Public, and kept stable.

Subclass `AsyncObjects` and give it six methods; `ConditionalStore` (in `conditional.py`) makes a
tier of it: layout, first writer wins, lost replies, repair, retries, bounded memory, handles by
process.

The methods with one leading underscore are yours to write and nobody's to call; the others are
the requests made of them, with deadlines and retries, and are not overridden:

* `_connect()`: a new connection for this process; it must not wait for the event loop.
* `classify(error)`: what your client's error means, a `Trouble`.
* `_get(handle, path, limit)`: a small object and its version, cut at `limit` + 1 bytes.
* `_create(handle, path, data)`: ONE operation that writes only where nothing is, and shows all or
  nothing; where something is, an error that `classify` calls `Kind.PRECONDITION`.
* `_replace(handle, path, data, version)`: the same, only where `version` is. Where it cannot be,
  raise what `classify` calls `Kind.FATAL` with the code `ENOTSUP`: then damaged records are left
  and told, and there are no leases.
* `_upload(handle, path, pieces)`: a large object from `Pieces`; nothing visible before the last
  was taken. `attempt` tries a part of it again.
* `_range`, `_list`, `_remove`: bytes of an object, all objects below a folder, removal. They have a
  body for an asynchronous fsspec file system.

All are coroutines on one event loop but the first two. `path` begins with the root that the object
was made with. (`Objects`, its base, is for clients that block: `s3.py` has one.) The create is
measured before the first publish of a process (`TierUnfit`): a store that ignores its condition is
refused and not trusted.
"""

from __future__ import annotations

from neuron_store_backends._async_objects import AsyncObjects
from neuron_store_backends._objects import PIECE, Blob, Objects, Stored
from neuron_store_backends._options import TIMES, Times, check_root, require_module
from neuron_store_backends._options import times as read_times
from neuron_store_backends._pieces import Pieces
from neuron_store_backends._trouble import Kind, Trouble, network_trouble
from neuron_store_backends.conditional import ConditionalStore

__all__ = [
    "PIECE",
    "TIMES",
    "AsyncObjects",
    "Blob",
    "ConditionalStore",
    "Kind",
    "Objects",
    "Pieces",
    "Stored",
    "Times",
    "Trouble",
    "check_root",
    "network_trouble",
    "read_times",
    "require_module",
]
