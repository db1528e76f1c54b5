"""Bytes are copied whole or refused, whichever way they travel."""

from __future__ import annotations

import hashlib
import io
import os
from typing import TYPE_CHECKING

import pytest

from neuron_store import ArtifactCorrupt, InvalidArtifact, streams
from neuron_store.artifact import ArtifactFile

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [0, 1, 4095, (16 << 20) - 1, 16 << 20, (37 << 20) + 13]


@pytest.fixture(params=["kernel", "buffers", "stream"])
def opened(request, monkeypatch, tmp_path):
    """Opens bytes so that they are copied one way or the other."""
    if request.param == "buffers":
        monkeypatch.setattr(streams, "_pump_in_kernel", lambda *_a, **_k: None)

    def open_(data: bytes):
        if request.param == "stream":
            return io.BytesIO(data)
        path = tmp_path / "source"
        path.write_bytes(data)
        return open(path, "rb", buffering=0)

    return open_


def copy(stream, into: Path, file: ArtifactFile, *, early=True) -> ArtifactFile:
    with stream:
        return streams.copy_stream(stream, into, file, key="k", location="here", early=early)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("early", [False, True])
def test_what_arrives_is_what_was_sent_and_its_digest(opened, tmp_path, size, early):
    data = os.urandom(size)
    (tmp_path / "into").mkdir()
    copied = copy(opened(data), tmp_path / "into", ArtifactFile("a/f", size), early=early)
    assert copied.sha256 == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "into/a/f").read_bytes() == data


@pytest.mark.parametrize("size", [10, 17 << 20])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_source_of_another_size_is_refused(opened, tmp_path, size, off):
    with pytest.raises(ArtifactCorrupt, match="bytes"):
        copy(opened(bytes(size + off)), tmp_path, ArtifactFile("f", size))


@pytest.mark.parametrize("size", [10, 17 << 20])
def test_other_bytes_than_the_digest_says_are_refused(opened, tmp_path, size):
    with pytest.raises(ArtifactCorrupt, match="sha256"):
        copy(opened(bytes(size)), tmp_path, ArtifactFile("f", size, "0" * 64))


def test_an_existing_file_and_a_link_are_never_written_to(tmp_path):
    (tmp_path / "f").write_text("mine")
    (tmp_path / "l").symlink_to(tmp_path / "elsewhere")
    for name in ("f", "l"):
        with pytest.raises(FileExistsError):
            copy(io.BytesIO(b"x"), tmp_path, ArtifactFile(name, 1))
    assert (tmp_path / "f").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_trouble_while_digesting_ends_the_copy(opened, tmp_path, monkeypatch):
    class Broken:
        def update(self, _piece):
            raise RuntimeError("no")

        def hexdigest(self):
            return ""

    monkeypatch.setattr(streams.hashlib, "sha256", Broken)
    with pytest.raises(RuntimeError, match="no"):
        copy(opened(bytes(20 << 20)), tmp_path, ArtifactFile("f", 20 << 20))


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "l").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "p")
    for name in ("l", "p", "."):
        with pytest.raises(InvalidArtifact):
            streams.open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        streams.open_regular(tmp_path / "absent")


def test_sizes_below_a_directory_are_those_of_its_files_and_follow_no_link(tmp_path):
    place = tmp_path / "place"
    (place / "a" / "b").mkdir(parents=True)
    (place / "one").write_bytes(b"x" * 10)
    (place / "a" / "b" / "two").write_bytes(b"x" * 5000)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "large").write_bytes(b"x" * 100_000)
    (place / "link").symlink_to(tmp_path / "elsewhere")
    length, blocks = streams.sizes_below(place)
    assert length == 5010 + (place / "link").lstat().st_size
    assert 5010 <= blocks < 100_000
    os.truncate(place / "one", 1 << 30)
    grown, sparse = streams.sizes_below(place)
    assert grown == length - 10 + (1 << 30)
    assert sparse < 1 << 20
    assert streams.sizes_below(tmp_path / "none") == (0, 0)
