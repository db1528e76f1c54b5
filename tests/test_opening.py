"""`save_cache` and `get_neuron_compile_cache_dir` behave as the Neuron stack's reference says."""

from __future__ import annotations

import os
import threading

import pytest

from neuron_store import (
    ArtifactCorrupt,
    ArtifactIncomplete,
    ConfigError,
    InvalidKey,
    PromoteError,
    Publication,
    get_neuron_compile_cache_dir,
    open_store,
    save_cache,
)
from neuron_store_backends.local import LocalStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import write_entry

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def local(tmp_path):
    entry = tmp_path / "local" / KEY
    entry.mkdir(parents=True)
    write_entry(entry, KEY)
    return tmp_path / "local"


def test_an_entry_is_copied_to_the_remote_directory(local, tmp_path):
    remote = tmp_path / "mnt" / "cache"
    assert save_cache(local, str(remote), KEY) is Publication.CREATED
    files = {p.name for p in (remote / KEY).iterdir()}
    assert files == {
        ".artifact_metadata_v0.json",
        ".compilation_complete",
        ".neuron_store.json",
        "graph.hlo",
        f"graph_{KEY}.neff",
    }
    assert list((remote / ".staging").iterdir()) == []


def test_when_another_node_was_first_nothing_happens(local, tmp_path):
    remote = tmp_path / "remote"
    save_cache(local, remote, KEY)
    before = {p: p.stat().st_mtime_ns for p in (remote / KEY).iterdir()}
    assert save_cache(local, remote, KEY) is Publication.PRESENT
    assert {p: p.stat().st_mtime_ns for p in (remote / KEY).iterdir()} == before


def test_other_content_is_a_conflict_and_the_first_stays(local, tmp_path, caplog):
    """Pitfall 9."""
    remote = tmp_path / "remote"
    save_cache(local, remote, KEY)
    entry = tmp_path / "other" / KEY
    entry.mkdir(parents=True)
    write_entry(entry, KEY, b"another compile")
    assert save_cache(tmp_path / "other", remote, KEY) is Publication.CONFLICT
    assert "with other content" in caplog.text
    assert PosixStore(remote).verify(KEY).file(f"graph_{KEY}.neff").size == 1024 + len(b"payload")


def test_concurrent_nodes_make_one_entry(local, tmp_path):
    answers: list[Publication] = []
    threads = [
        threading.Thread(target=lambda: answers.append(save_cache(local, tmp_path / "r", KEY)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers.count(Publication.CREATED) == 1
    assert answers.count(Publication.PRESENT) == 7


@pytest.mark.parametrize("lost", ["graph.hlo", f"graph_{KEY}.neff", ".compilation_complete", KEY])
def test_an_incomplete_local_entry_is_a_runtime_error(local, tmp_path, lost):
    if lost == KEY:
        (local / KEY).rename(local / "elsewhere")
    else:
        (local / KEY / lost).unlink()
    with pytest.raises(RuntimeError, match="Cannot save cache") as caught:
        save_cache(local, tmp_path / "remote", KEY)
    assert isinstance(caught.value, ArtifactIncomplete)
    assert not (tmp_path / "remote").exists()


def test_an_incomplete_remote_entry_is_repaired(local, tmp_path):
    """Pitfall 6."""
    (tmp_path / "remote" / KEY).mkdir(parents=True)
    (tmp_path / "remote" / KEY / "graph.hlo").write_bytes(b"half")
    assert save_cache(local, tmp_path / "remote", KEY) is Publication.REPAIRED


def test_a_remote_that_cannot_be_written_is_an_error_and_no_mere_warning(local, tmp_path):
    """Pitfall 15."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PromoteError, match=KEY) as caught:
        save_cache(local, tmp_path / "file" / "cache", KEY)
    assert isinstance(caught.value, RuntimeError)


def test_the_remote_may_be_a_url(local):
    assert save_cache(local, "memory://save-cache-test", KEY) is Publication.CREATED
    with open_store("memory://save-cache-test", local=local / "fresh") as store:
        assert (store.get(KEY) / "graph.hlo").is_file()


def test_an_empty_path_is_refused_and_not_the_current_directory(local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in ((local, "", KEY), ("", tmp_path / "r", KEY)):
        with pytest.raises(ConfigError, match="empty"):
            save_cache(*arguments)
    with pytest.raises(ConfigError, match="empty"):
        open_store([], local="")


def test_promoting_a_directory_into_itself_does_nothing(local):
    assert save_cache(local, local, KEY) is Publication.PRESENT


def test_what_is_wrong_with_a_marked_entry_is_told(local, tmp_path):
    (local / KEY / f"graph_{KEY}.neff").write_bytes(b"N")
    with pytest.raises(ArtifactIncomplete, match="has 1 bytes"):
        save_cache(local, tmp_path / "remote", KEY)


def test_an_entry_that_the_neuron_stack_would_refuse_is_not_promoted(local, tmp_path):
    (local / KEY / ".artifact_metadata_v0.json").write_text('{"cache_key": "another"}')
    with pytest.raises(ArtifactCorrupt, match="Cache key mismatch"):
        save_cache(local, tmp_path / "remote", KEY)
    assert not (tmp_path / "remote").exists()


@pytest.mark.parametrize("key", ["../x", "a/b", "", "."])
def test_a_key_that_is_no_name_is_refused(local, tmp_path, key):
    with pytest.raises(InvalidKey):
        save_cache(local, tmp_path / "remote", key)


def test_the_cache_directory_is_a_string_below_the_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert get_neuron_compile_cache_dir() == f"{tmp_path}/neuron/compile_cache"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert get_neuron_compile_cache_dir() == f"{tmp_path}/.cache/vllm/neuron/compile_cache"
    assert not os.path.exists(get_neuron_compile_cache_dir())


def test_local_entries_may_be_promoted_while_ranks_use_them(local, tmp_path):
    store = LocalStore(local)
    path = store.path_of(KEY)
    with open(path / f"graph_{KEY}.neff", "rb") as in_use:
        assert save_cache(local, tmp_path / "remote", KEY) is Publication.CREATED
        assert in_use.read(8)
