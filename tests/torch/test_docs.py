"""docs/torch.md says what is so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")

from neuron_store.lowering.operators import OPERATORS
from neuron_store.torch_backend import BackendOptions

pytestmark = pytest.mark.torch

TEXT = (Path(os.getcwd()) / "docs" / "torch.md").read_text()


def test_the_list_of_operators_is_the_lowerings():
    listed = set(re.findall(r"`((?:aten|prims|higher_order)\.[\w.]+)`", TEXT))
    assert listed == {name for names in OPERATORS.values() for name in names}


def test_every_option_is_in_the_table():
    rows = set(re.findall(r"^\| `(\w+)` \|.*\|.*\|$", TEXT.split("## Options")[1], re.MULTILINE))
    assert set(BackendOptions.__annotations__) <= rows
