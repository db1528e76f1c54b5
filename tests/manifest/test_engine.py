import logging

import pytest

from neuron_store.manifest import engine
from neuron_store.manifest.engine import engine_id


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ("0-7", "dev0_7"),
        ("0,1,2", "dev0_2"),
        ("8-15", "dev8_15"),
        ("3", "dev3_3"),
        (" 0 - 3 ".replace(" - ", "-"), "dev0_3"),
        ("0-3,8-11", "dev0_11"),
        ("16, 17", "dev16_17"),
        ("", "nodev"),
        ("  ", "nodev"),
    ],
)
def test_the_id_is_first_and_last_visible_device(devices, name):
    assert engine_id({"NEURON_VISIBLE_DEVICES": devices}) == name


def test_without_the_variable_there_is_no_device():
    assert engine_id({}) == "nodev"


@pytest.mark.parametrize(
    "devices", ["a", "7-0", "0-", "-1", "0..7", "1,,2", "0-7;8", "../x", "٣", "9999999", "0x1"]
)
def test_garbage_is_nodev_with_one_warning(devices, caplog):
    engine._known.pop(devices, None)
    with caplog.at_level(logging.WARNING):
        assert engine_id({"NEURON_VISIBLE_DEVICES": devices}) == "nodev"
        assert engine_id({"NEURON_VISIBLE_DEVICES": devices}) == "nodev"
    assert len(caplog.records) == 1
    assert "NEURON_VISIBLE_DEVICES" in caplog.text


def test_the_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7")
    assert engine_id() == "dev0_7"
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-15")
    assert engine_id() == "dev8_15"
