from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from neuron_store_backends.local import LocalStore
from tests.manifest.entries import InterfaceOnly

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path) -> Path:
    """Of the local tier."""
    return tmp_path / "cache"


@pytest.fixture
def store(root) -> LocalStore:
    return LocalStore(root)


@pytest.fixture
def remote(tmp_path) -> InterfaceOnly:
    """A tier without directories of its own."""
    return InterfaceOnly(tmp_path / "remote")


@pytest.fixture
def manifests(tmp_path, monkeypatch) -> Path:
    """The feature switched on, on an engine of eight cores."""
    root = tmp_path / "manifests"
    monkeypatch.setenv("VLLM_NEURON_MANIFEST_DIR", str(root))
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    return root
