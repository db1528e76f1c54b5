from __future__ import annotations

import pytest

from tests.backends.cases import ConditionalCases

pytest.importorskip("adlfs")


class TestAzurite(ConditionalCases):
    @pytest.fixture
    def place(self, azure_place):
        return azure_place
