from __future__ import annotations

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The local tier's root, empty, with nothing of the caller's settings."""
    for name in ("NEURON_STORE_TIERS", "NEURON_STORE_CONFIG", "NEURON_LIBTORCH_REMOTE_CACHE",
                 "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
                 "VLLM_NEURON_MANIFEST_DIR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    import torch

    from neuron_store import _once

    torch._dynamo.reset()
    _once._told.clear()
    torch.manual_seed(0)
    yield tmp_path / "root" / "neuron" / "compile_cache"
    torch._dynamo.reset()
