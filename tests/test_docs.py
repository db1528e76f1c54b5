"""Every shown block of Python runs, every link leads somewhere, every setting is documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_store.variables import CONFIG_VARIABLE, VARIABLES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks():
    for page in PAGES:
        for number, code in enumerate(BLOCK.findall(page.read_text())):
            needs = ["torch"] if "import torch" in code or "fx_key" in code else []
            marks = [pytest.mark.torch] if needs else []
            yield pytest.param(code, needs, marks=marks, id=f"{page.name}-{number}")


@pytest.mark.parametrize(("code", "needs"), list(blocks()))
def test_the_block_runs(code, needs, tmp_path):
    for module in needs:
        pytest.importorskip(module, reason=f"the block needs {module}, which is not installed")
    script = tmp_path / "block.py"
    script.write_text(code)
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "VLLM_"))},
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_documented():
    text = (ROOT / "docs" / "settings.md").read_text()
    for name in [*VARIABLES, CONFIG_VARIABLE]:
        assert f"`{name}`" in text, name
    for variable in VARIABLES.values():
        assert f"`{variable.field}`" in text, variable.field
