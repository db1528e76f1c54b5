from __future__ import annotations

import pytest

from neuron_store.byte_sizes import human_bytes, parse_bytes
from neuron_store.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 40, "1.0 TiB")]
)
def test_bytes_for_people(size, text):
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1K", 1024), ("20MB", 20 << 20), ("0.5 GiB", 1 << 29), ("2t", 2 << 40), ("0", 0)],
)
def test_a_size_may_have_a_unit(text, size):
    assert parse_bytes(text, option="--budget") == size


@pytest.mark.parametrize("text", ["x", "-1", "1Q", "", "nan", "inf", "1e40", "K"])
def test_what_is_no_size_is_refused_with_the_option(text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_bytes(text, option="--budget")
