from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.manifest.stores import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "cache")


@pytest.fixture
def remote(tmp_path) -> DirectoryStore:
    """A tier without directories of its own."""
    return DirectoryStore(tmp_path / "remote", remote=True)


@pytest.fixture
def manifests(tmp_path, monkeypatch) -> Path:
    """The feature switched on, on an engine of eight cores."""
    root = tmp_path / "manifests"
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(root))
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    return root
