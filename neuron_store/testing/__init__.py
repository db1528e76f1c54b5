"""What a tier is tested with: the contract, and the faults that it must survive.

    from neuron_store.testing import ArtifactStoreContract

    class TestMyTier(ArtifactStoreContract):
        @pytest.fixture
        def factory(self, tmp_path):
            return functools.partial(MyTier, str(tmp_path / "tier"))

Needs pytest, which neuron_store itself does not depend on.
"""

import pytest

pytest.register_assert_rewrite("neuron_store.testing.contract", "neuron_store.testing.leasing")

from neuron_store.testing.contract import ArtifactStoreContract  # noqa: E402  (rewritten first)
from neuron_store.testing.killing import KilledAt, run_killed_at  # noqa: E402  (as above)
from neuron_store.testing.racing import Race, race_publishers  # noqa: E402  (as above)
from neuron_store.testing.samples import make_source  # noqa: E402  (as above)

__all__ = [
    "ArtifactStoreContract",
    "KilledAt",
    "Race",
    "make_source",
    "race_publishers",
    "run_killed_at",
]
