"""Tiers come through entry points: a third party's as ours, duplicates refused aloud."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PLUGIN = """
from neuron_store_backends.memory import MemoryStore
class SftpStore(MemoryStore):
    @classmethod
    def from_url(cls, url):
        return cls(url.address, name="sftp")
"""


@pytest.fixture
def site(tmp_path):
    """A directory with installed distributions: their modules and entry points."""

    def install(name, module, code, *entries):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(entries)
        (info / "entry_points.txt").write_text(f"[neuron_store.tiers]\n{lines}\n")

    def run(code):
        setup = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        return subprocess.run(
            [sys.executable, "-c", setup + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
        )

    return install, run


def test_an_installed_plugin_is_found_by_its_scheme(site):
    install, run = site
    install("sftp-tier", "sftp_tier", PLUGIN, "sftp = sftp_tier:SftpStore")
    ended = run("""
        from neuron_store.registry import known_schemes, open_tier
        assert "sftp" in known_schemes()
        assert "sftp_tier" not in sys.modules
        print(open_tier("sftp://host/path").name)
    """)
    assert (ended.stdout, ended.stderr) == ("sftp\n", "")


def test_two_plugins_for_one_scheme_are_refused_and_both_named(site):
    install, run = site
    install("one-tier", "one_tier", PLUGIN, "sftp = one_tier:SftpStore")
    install("two-tier", "two_tier", PLUGIN, "sftp = two_tier:SftpStore")
    ended = run("""
        from neuron_store import ConfigError, open_store
        try:
            open_store("sftp://host/path")
        except ConfigError as error:
            print(error)
    """)
    assert "one-tier" in ended.stdout
    assert "two-tier" in ended.stdout


def test_a_plugin_cannot_take_a_first_party_scheme_in_silence(site):
    install, run = site
    install("evil-tier", "evil_tier", PLUGIN, "s3 = evil_tier:SftpStore")
    ended = run("""
        from neuron_store import ConfigError
        from neuron_store.registry import open_tier
        try:
            open_tier("s3://bucket/prefix")
        except ConfigError as error:
            print(error)
    """)
    assert "provided twice" in ended.stdout
    assert "evil-tier" in ended.stdout


def test_a_plugin_that_cannot_be_imported_is_named(site):
    install, run = site
    install("bad-tier", "bad_tier", "import paramiko_absent", "bad = bad_tier:X")
    ended = run("""
        from neuron_store import ConfigError
        from neuron_store.registry import open_tier
        try:
            open_tier("bad://x")
        except ConfigError as error:
            print(error)
    """)
    assert "bad-tier" in ended.stdout
    assert "paramiko_absent" in ended.stdout
