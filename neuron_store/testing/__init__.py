"""What a tier is tested with: the contract, and the faults that it must survive.

    from neuron_store.testing import ArtifactStoreContract

    class TestMyTier(ArtifactStoreContract):
        @pytest.fixture
        def factory(self, tmp_path):
            return functools.partial(MyTier, str(tmp_path / "tier"))

`docs/writing-a-tier.md` shows the rest. Needs pytest, which neuron_store does not depend on.
"""

import pytest

pytest.register_assert_rewrite("neuron_store.testing.contract", "neuron_store.testing.leasing")

from neuron_store.testing.contract import ArtifactStoreContract  # noqa: E402  (rewritten first)
from neuron_store.testing.faulty_files import (  # noqa: E402  (as above)
    FaultyFiles,
    FileFault,
    faults_for,
)
from neuron_store.testing.faulty_store import Fault, FaultyStore  # noqa: E402  (as above)
from neuron_store.testing.injecting import (  # noqa: E402  (as above)
    COLLECT,
    DELETE,
    FETCH,
    FIND,
    GET,
    LEASE,
    OPERATIONS,
    PUBLISH,
    PUBLISH_AGAIN,
    PUBLISH_CONSUMING,
    PUBLISH_OTHER,
    Bench,
    Injected,
    Operation,
    inject_files,
    inject_steps,
)
from neuron_store.testing.killing import KilledAt, run_killed_at  # noqa: E402  (as above)
from neuron_store.testing.racing import Race, race_publishers  # noqa: E402  (as above)
from neuron_store.testing.samples import make_source  # noqa: E402  (as above)
from neuron_store.testing.worlds import (  # noqa: E402  (as above)
    Act,
    Broken,
    World,
    every_interleaving,
)

__all__ = [
    "COLLECT",
    "DELETE",
    "FETCH",
    "FIND",
    "GET",
    "LEASE",
    "OPERATIONS",
    "PUBLISH",
    "PUBLISH_AGAIN",
    "PUBLISH_CONSUMING",
    "PUBLISH_OTHER",
    "Act",
    "ArtifactStoreContract",
    "Bench",
    "Broken",
    "Fault",
    "FaultyFiles",
    "FaultyStore",
    "FileFault",
    "Injected",
    "KilledAt",
    "Operation",
    "Race",
    "World",
    "every_interleaving",
    "faults_for",
    "inject_files",
    "inject_steps",
    "make_source",
    "race_publishers",
    "run_killed_at",
]
