"""Bad input through the real command: a typed error that names the thing and the remedy."""

from __future__ import annotations

import ctypes
import json
import os
import stat

import pytest

from tests.cli.conftest import KEY

RECORD = ".neuron_store.json"


def refused(result, *pieces: str, status: int = 2):
    """The command said no, in one error that holds all the pieces."""
    assert result.returncode == status, result.stderr
    assert "error: " in result.stderr
    for piece in pieces:
        assert piece in result.stderr


class TestSettings:
    def test_unknown_scheme(self, command):
        refused(command("--tier", "ftp://host/x", "ls"), "'ftp'", "known: abfs, az, ", "install")

    @pytest.mark.parametrize(
        ("scheme", "package", "extra"), [("s3", "botocore", "s3"), ("az", "adlfs", "azure")]
    )
    def test_missing_extra(self, command, tmp_path, scheme, package, extra):
        # As on a machine without it: importing it fails, and it is found nowhere.
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules['{package}'] = None")
        env = {"PYTHONPATH": str(tmp_path)}
        result = command("--tier", f"{scheme}://bucket/x", "ls", env=env)
        refused(result, package, f"pip install 'neuron-store[{extra}]'")

    @pytest.mark.parametrize(
        ("content", "piece"),
        [
            (None, "No such file"),
            ("tiers = [", "is not TOML"),
            (b"\xff\xfe", "is not TOML"),
            ("teirs = []", "did you mean 'tiers'?"),
            ("tiers = 5", "neither a string of URLs nor a list"),
            ("compile_attempts = 0", "not a whole number"),
            ("fleet_lease = 'perhaps'", "not a boolean"),
            ('tiers = [{ url = "s3://b", secret_key = "hunter2" }]', "looks like a credential"),
        ],
    )
    def test_unreadable_toml(self, command, tmp_path, content, piece):
        file = tmp_path / "settings.toml"
        if content is not None:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        result = command("config", env={"NEURON_STORE_CONFIG": str(file)})
        refused(result, piece)
        assert "settings.toml" in result.stderr or "NEURON_STORE_TIERS" in result.stderr
        assert "hunter2" not in result.stderr

    def test_settings_file_that_is_a_directory(self, command, tmp_path):
        result = command("ls", env={"NEURON_STORE_CONFIG": str(tmp_path)})
        refused(result, str(tmp_path), "directory")

    @pytest.mark.parametrize(
        "name",
        [
            "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE",
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
            "NEURON_STORE_FLEET_LEASE",
        ],
    )
    def test_unparsable_boolean(self, command, name):
        refused(command("config", env={name: "maybe"}), name, "'maybe'", "use 1, 0, true")

    @pytest.mark.parametrize("url", ["s3://AKIA:hunter2@bucket/x", "s3://b/x?secret_key=hunter2"])
    def test_credentials_in_a_url_are_refused_and_not_repeated(self, command, url):
        result = command("--tier", url, "ls")
        refused(result, "credential")
        assert "hunter2" not in result.stderr

    def test_relative_tier(self, command):
        refused(command("--tier", "some/where", "ls"), "'some/where'", "absolute path")

    def test_unknown_option_of_a_tier(self, command):
        refused(command("--tier", "posix:///x?fast=1", "ls"), "'fast'", "known: name, read_only")

    def test_cache_off_and_compiling_forbidden(self, command, tmp_path):
        env = {
            "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1",
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
        }
        refused(command("config", env=env), *env, "unset one of them")


class TestRoots:
    @pytest.mark.parametrize("arguments", [["fetch", KEY], ["doctor"]])
    def test_a_local_root_below_a_file(self, command, put, places, tmp_path, arguments):
        put(places.shared)
        (tmp_path / "file").write_text("")
        root = tmp_path / "file" / "cache"
        result = command("--local", root, "--tier", places.shared, *arguments)
        refused(result, str(root), "ot a directory", status=1)

    def test_a_root_that_may_not_be_written(self, command, put, places):
        put(places.shared)
        places.local.mkdir(mode=0o555)
        options = ["--local", places.local, "--tier", places.shared]
        result = command(*options, "fetch", KEY, preexec_fn=obey_modes)
        refused(result, str(places.local), "Permission denied", "give this user", status=1)
        assert list(places.local.iterdir()) == []


def obey_modes() -> None:
    """Give up, for good, root's right to read and write whatever it likes."""
    drop_capability = 24
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(drop_capability, capability, 0, 0, 0)


class TestBuckets:
    @pytest.fixture
    def env(self):
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "very-secret-testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @pytest.mark.parametrize("arguments", [["ls"], ["fetch", KEY], ["show", KEY], ["doctor"]])
    def test_wrong_bucket(self, command, server, env, places, arguments):
        tier = f"s3://no-such-bucket/x?endpoint_url={server.url}"
        result = command("--local", places.local, "--tier", tier, *arguments, env=env)
        refused(result, "no-such-bucket", "does not exist", status=1)

    def test_no_credentials(self, command, server, env, places, tmp_path):
        tier = f"s3://bucket/x?endpoint_url={server.url}"
        env = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1"}
        result = command("--local", places.local, "--tier", tier, "ls", env=env)
        refused(result, "s3://bucket/x", "no usable credentials", "AWS_PROFILE", status=1)

    def test_no_server(self, command, env, places):
        tier = "s3://bucket/x?endpoint_url=http://127.0.0.1:9"
        result = command("--local", places.local, "--tier", tier, "ls", env=env)
        refused(result, "s3://bucket/x", "refused", "check the endpoint", status=1)
        assert "very-secret" not in result.stdout + result.stderr


BAD_KEYS = ["../x", "a/b", "/etc/passwd", "..", ".hidden", "", "a" * 201]


@pytest.mark.parametrize("name", ["show", "fetch", "promote", "verify"])
def test_key_that_is_no_single_path_component(cli, command, places, name):
    for key in BAD_KEYS:
        assert "invalid key" in cli(name, key, status=2).stderr
    result = command("--local", places.local, "--tier", places.shared, name, "../x")
    refused(result, "invalid key '../x'", "one path component")
    assert not places.local.exists()
    assert not places.shared.exists()


def record(**changes: object) -> str:
    facts = {
        "neuron_store_record": 1,
        "key": KEY,
        "write_id": "0" * 32,
        "created": "2025-01-01T00:00:00+00:00",
        "files": [{"name": "program", "size": 4, "sha256": None}],
    }
    return json.dumps({**facts, **changes})


def named(name: str) -> str:
    return record(files=[{"name": name, "size": 9, "sha256": None}])


class TestHostileEntries:
    """Whoever can write a shared tier can put anything there."""

    @pytest.fixture
    def tried(self, cli, command, places):
        before = snapshot(places.outside)

        def run(*pieces: str):
            for name in ("show", "verify"):
                told = cli(name, KEY, status=1).stderr
                assert all(piece in told for piece in (KEY, *pieces))
            options = ["--local", places.local, "--tier", places.shared]
            result = command(*options, "fetch", KEY)
            refused(result, KEY, *pieces, status=1)
            assert "untouched" not in result.stdout
            assert snapshot(places.outside) == before
            left = {p.name for p in places.local.rglob("*") if p.is_file()}
            assert not left - {f".{KEY}.compilation_metadata.lock"}

        return run

    @pytest.fixture
    def entry(self, places):
        entry = places.shared / KEY
        entry.mkdir(parents=True)
        (entry / "program").write_bytes(b"abcd")
        return entry

    @pytest.mark.parametrize(
        ("content", "piece"),
        [
            (named("../../outside/x"), "unsafe file name"),
            (named("a/../../../outside/x"), "unsafe file name"),
            (named("/etc/hostname"), "unsafe file name"),
            (named(".neuron_store.json"), "unsafe file name"),
            (record()[:-20], "not JSON"),
            ("", "not JSON"),
            ("\x00\x01", "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('{"some": "thing"}', "not a record of neuron_store"),
            ("[]", "not a record of neuron_store"),
            (record(neuron_store_record=99), "upgrade neuron-store"),
            (record(key="f" * 32), "not of " + KEY),
            (record(key="../../outside"), "unsafe key"),
            (record(files=[]), "files is not a list"),
            (record(files=[{"name": "program", "size": -1}]), "size of 'program'"),
            (record(executable="elsewhere"), "not among its files"),
        ],
    )
    def test_record(self, tried, entry, content, piece):
        (entry / RECORD).write_text(content)
        tried(piece)

    def test_file_that_is_a_symbolic_link(self, tried, entry, places):
        (entry / RECORD).write_text(named("program"))
        (entry / "program").unlink()
        (entry / "program").symlink_to(places.outside / "x")
        tried("program is not a regular file")

    def test_folder_that_is_a_symbolic_link(self, tried, entry, places):
        (entry / RECORD).write_text(named("folder/x"))
        (entry / "folder").symlink_to(places.outside)
        tried("folder/x")

    def test_record_that_is_a_symbolic_link(self, tried, entry, tmp_path):
        (tmp_path / "record").write_text(record())
        (entry / RECORD).symlink_to(tmp_path / "record")
        tried("is a link or a device")

    def test_file_that_is_a_pipe(self, tried, entry):
        (entry / RECORD).write_text(record())
        (entry / "program").unlink()
        os.mkfifo(entry / "program")
        tried("program is not a regular file")

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can make a device")
    def test_file_that_is_a_device(self, tried, entry):
        (entry / RECORD).write_text(record())
        (entry / "program").unlink()
        os.mknod(entry / "program", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        tried("program is not a regular file")

    def test_entry_that_is_a_symbolic_link(self, command, put, places):
        put(places.outside)
        places.shared.mkdir()
        (places.shared / KEY).symlink_to(places.outside / KEY)
        options = ["--local", places.local, "--tier", places.shared]
        assert command(*options, "fetch", KEY).returncode == 1
        assert not (places.local / KEY).exists()

    def test_executable_of_the_neuron_stack_cut_to_one_byte(self, command, places):
        entry = places.shared / KEY
        entry.mkdir(parents=True)
        (entry / "graph.hlo").write_bytes(b"hlo")
        (entry / f"graph_{KEY}.neff").write_bytes(b"\x02")
        (entry / ".artifact_metadata_v0.json").write_text(json.dumps({"cache_key": KEY}))
        (entry / ".compilation_complete").write_text("completed:1.0\nneff_size:2048\n")
        result = command("--local", places.local, "--tier", places.shared, "fetch", KEY)
        refused(result, KEY, status=1)
        assert not (places.local / KEY).exists()


class TestManifest:
    @pytest.mark.parametrize(
        ("content", "piece"),
        [
            ("{", "not JSON"),
            ("{}", "manifest_version is missing"),
            ('{"manifest_version": "9"}', "upgrade neuron-store"),
            ('{"manifest_version": "1", "graphs": [{"graph_hash": "../x"}]}', "../x"),
        ],
    )
    def test_broken_manifest(self, command, places, tmp_path, content, piece):
        file = tmp_path / "manifest.json"
        file.write_text(content)
        options = ["--local", places.local, "--tier", places.shared]
        result = command(*options, "promote", "--manifest", file)
        refused(result, str(file), piece)

    def test_missing_manifest(self, command, tmp_path):
        result = command("promote", "--manifest", tmp_path / "none.json")
        assert result.returncode == 2
        assert "does not exist" in result.stderr


def snapshot(directory):
    return {
        (str(path), path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in directory.rglob("*")
    }
