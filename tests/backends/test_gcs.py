from __future__ import annotations

import pytest

from tests.backends.cases import ConditionalCases

pytest.importorskip("gcsfs")


class TestFakeGcs(ConditionalCases):
    @pytest.fixture
    def place(self, gcs_place):
        return gcs_place
