from __future__ import annotations

import pytest

from neuron_store.durations import human_duration, parse_duration
from neuron_store.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 30 * 86400),
        ("12h", 43200),
        ("1d 12h", 129600),
        ("90 m", 5400),
        ("2W", 1209600),
        ("0s", 0),
        ("1.5h", 5400),
        (" 45s ", 45),
    ],
)
def test_a_duration_is_read_as_people_write_it(text, seconds):
    assert parse_duration(text, option="--older-than") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "30", "-1d", "1y", "d", "1d x", "1e3d", "nan", "inf d", "200000w", "\u0661d", "1d,2h"],
)
def test_what_is_no_duration_is_refused_with_the_option_and_an_example(text):
    with pytest.raises(ConfigError, match=r"--older-than .* is no duration; write 30d"):
        parse_duration(text, option="--older-than")


def test_a_duration_is_told_with_one_unit():
    assert [human_duration(s) for s in (0, 12, 90, 16200, 30 * 86400)] == [
        "0 s",
        "12 s",
        "1.5 m",
        "4.5 h",
        "30 d",
    ]
