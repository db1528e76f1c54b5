"""The S3 tier on real servers other than moto."""

from __future__ import annotations

import pytest

from neuron_store.errors import TierUnfit
from tests.backends.cases import CONTENTS, ConditionalCases, fill


@pytest.mark.slow
class TestSeaweed(ConditionalCases):
    """SeaweedFS takes a second or more for a race round, so there are fewer of them."""

    @pytest.fixture
    def place(self, seaweed_url, aws):
        from tests.backends.places import S3Place
        from tests.servers.seaweed import client

        return S3Place(client(seaweed_url), seaweed_url, bucket="warm-up")

    def race(self, place, source, tmp_path, method, processes=6, rounds=2):
        super().race(place, source, tmp_path, method, processes, rounds)


class TestRclone:
    """The negative control: it answers 200 to a condition that it ignored."""

    @pytest.fixture
    def place(self, rclone_url, aws):
        from tests.backends.places import S3Place
        from tests.servers.seaweed import client

        return S3Place(client(rclone_url), rclone_url)

    def test_it_is_refused_and_nothing_is_published(self, place, tmp_path):
        artifact = fill(tmp_path, CONTENTS, "k")
        store = place.store()
        with pytest.raises(TierUnfit, match="ignores the condition"):
            store.publish(artifact, tmp_path)
        # Payload that was sent meanwhile may be there, and no reader sees it.
        assert all(path.startswith("payload/k/") for path in place.paths())
        assert store.find("k") is None

    def test_the_probe_says_why(self, place):
        assert "create-if-absent" in (place.store().probe().refused or "")
