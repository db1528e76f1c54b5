"""Garbage collection on the object tiers: each cloud, and what S3 alone leaves behind."""

from __future__ import annotations

import pytest

from tests.backends.collecting_cases import CollectingCases


class TestMemory(CollectingCases):
    @pytest.fixture
    def place(self):
        from tests.backends.test_memory import MemoryPlace

        return MemoryPlace()
