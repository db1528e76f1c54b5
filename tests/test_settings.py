"""Settings: environment over file over default, and what is said of values that do not fit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from neuron_store import ConfigError, MissingExtra, UnknownScheme, open_store, settings, variables
from neuron_store.policy import CompilePolicy
from neuron_store.registry import known_schemes, open_tier
from neuron_store.settings import compile_cache_dir, filesystem_type, load_settings, own_directory
from neuron_store.tier_url import parse_tier_url
from neuron_store.variables import VARIABLES, Sources

HOME = {"HOME": "/home/someone", "USER": "someone"}


@pytest.fixture(autouse=True)
def forget_warnings():
    variables._warned.clear()
    settings._told_about_home = False


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return {**HOME, "NEURON_STORE_CONFIG": str(path)}


def test_the_defaults_are_the_seeds():
    loaded = load_settings(HOME)
    assert loaded.local_root == Path("/home/someone/.cache/vllm/neuron/compile_cache")
    assert loaded.tiers == ()
    assert loaded.policy == CompilePolicy()
    assert (loaded.policy.timeout, loaded.policy.attempts, loaded.tier_deadline) == (600, 2, 30)
    assert loaded.manifest_dir is None
    assert all(origin == "default" for _, origin in loaded.values.values())


def test_the_cache_root_is_respected_and_an_empty_one_is_unset():
    assert load_settings({**HOME, "VLLM_CACHE_ROOT": "/data/c"}).local_root == Path(
        "/data/c/neuron/compile_cache"
    )
    assert load_settings({**HOME, "VLLM_CACHE_ROOT": ""}).local_root.is_relative_to("/home/someone")


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre"])
def test_a_home_on_a_network_file_system_falls_back_to_tmp(monkeypatch, caplog, kind):
    monkeypatch.setattr(settings, "filesystem_type", lambda _path: kind)
    made: list[Path] = []
    monkeypatch.setattr(settings, "own_directory", made.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = compile_cache_dir(Sources.load(HOME))
    assert found == Path("/tmp/vllm_neuron_wdir_someone/neuron/compile_cache")
    assert made == [Path("/tmp/vllm_neuron_wdir_someone")] * 2
    assert len(caplog.records) == 1


def test_a_user_name_that_leaves_tmp_is_refused(monkeypatch):
    monkeypatch.setattr(settings, "filesystem_type", lambda _path: "nfs4")
    with pytest.raises(ConfigError, match="USER"):
        compile_cache_dir(Sources.load({**HOME, "USER": "../../etc"}))


def test_the_directory_below_tmp_is_made_for_this_user_alone(tmp_path):
    place = tmp_path / "wdir"
    own_directory(place)
    assert place.stat().st_mode & 0o777 == 0o700
    own_directory(place)
    place.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        own_directory(place)
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="symbolic link"):
        own_directory(place)
    place.unlink()
    place.write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        own_directory(place)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a directory away")
def test_a_directory_below_tmp_that_somebody_else_owns_is_refused(tmp_path):
    place = tmp_path / "wdir"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        own_directory(place)


def test_file_system_types_come_from_the_kernel():
    assert filesystem_type(Path("/proc/self")) == "proc"
    assert filesystem_type(Path("/")) not in {"", "proc"}


def test_environment_wins_over_file_and_file_over_default(tmp_path):
    environ = toml(
        tmp_path,
        """
        compilation_timeout = 900
        disable_warmup_compile = true
        promote = "auto"
        [[tiers]]
        url = "s3://bucket/prefix"
        endpoint_url = "http://127.0.0.1:9000"
        read_only = true
        [[tiers]]
        url = "/mnt/cache"
        name = "fsx"
        """,
    )
    loaded = load_settings({**environ, "NEURON_LIBTORCH_COMPILATION_TIMEOUT": "30"})
    assert loaded.policy.timeout == 30
    assert loaded.policy.require_hit
    assert loaded.policy.promote
    s3, posix = loaded.tiers
    assert (s3.location, s3.read_only) == ("s3://bucket/prefix", True)
    assert s3.options == {"endpoint_url": "http://127.0.0.1:9000"}
    assert (posix.scheme, posix.address, posix.name) == ("posix", "/mnt/cache", "fsx")
    origins = {name: origin for name, (_, origin) in loaded.values.items()}
    assert origins["NEURON_LIBTORCH_COMPILATION_TIMEOUT"] == "environment"
    assert origins["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] == environ["NEURON_STORE_CONFIG"]
    assert origins["NEURON_STORE_COMPILE_ATTEMPTS"] == "default"


def test_the_remote_cache_comes_first_and_is_not_asked_twice():
    loaded = load_settings(
        {
            **HOME,
            "NEURON_LIBTORCH_REMOTE_CACHE": "/mnt/fsx/cache",
            "NEURON_STORE_TIERS": "  s3://b/p?read_only=1   /mnt/fsx/cache ",
        }
    )
    assert [t.location for t in loaded.tiers] == ["/mnt/fsx/cache", "s3://b/p"]


def test_one_place_behind_two_endpoints_is_two_tiers_and_read_only_is_never_lost():
    loaded = load_settings(
        {
            **HOME,
            "NEURON_LIBTORCH_REMOTE_CACHE": "s3://b/p?endpoint_url=http://one",
            "NEURON_STORE_TIERS": "s3://b/p?endpoint_url=http://two&name=two "
            "s3://b/p?endpoint_url=http://one&read_only=1&name=release",
        }
    )
    assert [(t.name, t.read_only) for t in loaded.tiers] == [("release", True), ("two", False)]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"HOME": "relative"}, "HOME"),
        ({**HOME, "VLLM_CACHE_ROOT": "~nobody-of-that-name/x"}, "VLLM_CACHE_ROOT"),
    ],
)
def test_a_root_that_depends_on_the_current_directory_is_refused(environ, told):
    with pytest.raises(ConfigError, match=told):
        load_settings(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NEURON_LIBTORCH_DISABLE_COMPILE_CACHE", "maybe"),
        ("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "2"),
        ("NEURON_STORE_FLEET_LEASE", "on"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "ten"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "0"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "nan"),
        ("NEURON_STORE_TIER_DEADLINE", "-1"),
        ("NEURON_STORE_LEASE_TTL", "0.01"),
        ("NEURON_STORE_LEASE_TTL", "901"),
        ("NEURON_STORE_LEASE_TTL", "nan"),
        ("NEURON_STORE_COMPILE_ATTEMPTS", "1.5"),
        ("NEURON_STORE_COMPILE_ATTEMPTS", "0"),
        ("NEURON_STORE_PROMOTE", "always"),
        ("NEURON_STORE_TIERS", "relative/path"),
        ("NEURON_STORE_TIERS", "s3://key:secret@bucket/p"),
        ("NEURON_LIBTORCH_REMOTE_CACHE", "relative"),
    ],
)
def test_a_value_that_does_not_parse_names_variable_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        load_settings({**HOME, name: value})
    assert name in str(caught.value)
    if "secret" not in value:
        assert value in str(caught.value)


@pytest.mark.parametrize("value", ["1", "true", "YES", " True "])
def test_booleans_take_words(value):
    assert load_settings({**HOME, "VLLM_NEURON_DISABLE_WARMUP_COMPILE": value}).policy.require_hit


def test_disabled_and_no_compile_contradict():
    with pytest.raises(ConfigError, match="both set"):
        load_settings(
            {
                **HOME,
                "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1",
                "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
            }
        )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tiers = [", "not TOML"),
        ('teirs = "x"', "did you mean 'tiers'"),
        ("tiers = 3", "tiers"),
        ("tiers = [{name = 'x'}]", "url"),
        ("compilation_timeout = 'x'", "compilation_timeout"),
        ("[[tiers]]\nurl = 's3://b/p'\nsecret_key = 'hush'", "credential"),
        ("remote_cache = {url = 's3://b', password = 'hush'}", "a dict is not a string"),
        ("remote_cache = ['s3://u:hush@b']", "a list is not a string"),
        ("promote = 's3://u:hush@b'", "neither 'auto'"),
        ("disable_compile_cache = []", "not a boolean"),
        ("verify = {u = 'hush'}", "none of 'always'"),
        (f"compilation_timeout = 0x{'f' * 400}", "an integer of 1600 bits"),
        (f"compilation_timeout = {'9' * 5000}", "not TOML"),
        (f"tiers = {'[' * 3000}", "not TOML"),
        (f"[[tiers]]\nurl = 's3://b'\nregion = 0x{'f' * 9000}", "neither a string"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
    ],
)
def test_an_unusable_file_is_named_with_its_fault(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        load_settings(toml(tmp_path, text))
    assert "hush" not in str(caught.value)


def test_a_files_name_of_any_length_is_told_in_short(tmp_path):
    with pytest.raises(ConfigError, match="too long") as caught:
        load_settings({**HOME, "NEURON_STORE_CONFIG": "/" + "[" * 20_000})
    assert len("".join(traceback.format_exception(caught.value))) < 10_000


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        load_settings({**HOME, "NEURON_STORE_CONFIG": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="directory"):
        load_settings({**HOME, "NEURON_STORE_CONFIG": str(tmp_path)})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="TOML"):
        load_settings({**HOME, "NEURON_STORE_CONFIG": str(tmp_path / "binary")})


def test_variables_without_effect_are_told_once(caplog):
    environ = {
        **HOME,
        "NEURON_STORE_TEIRS": "/x",
        "NEURON_COMPILE_CACHE_URL": "s3://x",
        "VLLM_NEURON_REMOTE_CACHE": "/y",
    }
    for _ in range(3):
        load_settings(environ)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 3
    assert any("did you mean NEURON_STORE_TIERS" in t for t in told)
    assert any("use NEURON_STORE_TIERS" in t for t in told)
    assert any("use NEURON_LIBTORCH_REMOTE_CACHE" in t for t in told)


def test_every_variable_of_the_design_is_a_setting():
    assert {
        "VLLM_CACHE_ROOT",
        "NEURON_LIBTORCH_REMOTE_CACHE",
        "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE",
        "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
        "VLLM_NEURON_MANIFEST_DIR",
        "NEURON_STORE_TIERS",
        "NEURON_STORE_COMPILE_ATTEMPTS",
        "NEURON_STORE_TIER_DEADLINE",
        "NEURON_STORE_PROMOTE",
        "NEURON_STORE_FLEET_LEASE",
        "NEURON_STORE_LEASE_TTL",
    } <= set(VARIABLES)


class TestTierUrls:
    def test_a_bare_path_is_taken_as_it_is(self):
        url = parse_tier_url("/mnt/odd?name#1")
        assert (url.scheme, url.address, url.options) == ("posix", "/mnt/odd?name#1", {})

    def test_a_bare_path_takes_the_options_that_every_tier_has(self):
        url = parse_tier_url("/mnt/cache?read_only=1&name=fsx")
        assert (url.address, url.read_only, url.name) == ("/mnt/cache", True, "fsx")

    def test_options_come_from_the_query(self):
        url = parse_tier_url("S3://bucket/a/b?endpoint_url=http://127.0.0.1:9&read_only=yes&name=n")
        assert (url.scheme, url.address) == ("s3", "bucket/a/b")
        assert url.options == {"endpoint_url": "http://127.0.0.1:9"}
        assert url.read_only
        assert url.name == "n"

    @pytest.mark.parametrize(
        "text",
        [
            "s3://AKIA:hush@bucket/p",
            "s3://bucket/p?secret=hush",
            "s3://bucket/p?aws_secret_access_key=hush",
            "az://c/p?sas_token=hush",
            "az://c/p?account_key=hush",
            "gs://b/p?token=hush",
            "s3://b/p?key=hush",
            "s3://b/p?pw=hush",
            "s3://b/p?endpoint_url=http://user:hush@127.0.0.1:9000",
            "s3://b/p?endpoint_url=http://h?token=hush",
            "s3://b/p?http://user:hush@h=1",
            "s3://b/p://user:hush@h/x",
            "abfs://user:hush@account/p",
        ],
    )
    def test_credentials_in_a_url_are_refused_and_not_repeated(self, text):
        with pytest.raises(ConfigError, match="credential") as caught:
            parse_tier_url(text)
        assert "hush" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "cache",
            "s3:/x",
            "s3://b/p?read_only=perhaps",
            "s3://b/p#x",
            "s3:/AK:hush@b/p",
            "s3:/b?token=hush",
            "s3://b/\x1b[2J",
            "a" * 9000 + "9://[",
            "posix:///mnt/ca\nche",
            "s3://b/\tp",
        ],
    )
    def test_what_is_no_address_is_refused(self, text):
        with pytest.raises(ConfigError) as caught:
            parse_tier_url(text)
        assert "hush" not in str(caught.value)
        assert len(str(caught.value)) < 1000

    def test_an_unknown_scheme_lists_the_known_ones_and_the_remedy(self):
        with pytest.raises(UnknownScheme, match="posix") as caught:
            open_tier("ftp://host/path")
        assert set(caught.value.known) == set(known_schemes())
        with pytest.raises(UnknownScheme, match="write the bare path"):
            open_tier("file:///mnt/cache")

    def test_an_unknown_option_lists_the_known_ones(self):
        with pytest.raises(ConfigError, match="unknown option 'endpoint'"):
            open_tier("posix:///mnt/cache?endpoint=x")

    def test_a_missing_extra_says_what_to_install(self):
        code = (
            "import sys; sys.modules['botocore'] = None\n"
            "from neuron_store import MissingExtra\n"
            "from neuron_store.registry import open_tier\n"
            "try:\n    open_tier('s3://b/p').find('a')\n"
            "except MissingExtra as e:\n    print(e)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert "pip install 'neuron-store[s3]'" in ended.stdout
        assert issubclass(MissingExtra, ImportError)


def test_first_party_tiers_come_through_the_public_door():
    assert {"local", "posix", "s3", "memory"} <= set(known_schemes())


def test_open_store_takes_tiers_from_the_caller_or_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("NEURON_STORE_TIERS", f"{tmp_path}/a memory://b?read_only=1")
    with open_store() as store:
        assert [t.location for t in store.tiers] == [
            str(tmp_path / "neuron" / "compile_cache"),
            f"{tmp_path}/a",
            "memory://b",
        ]
    with open_store(f"{tmp_path}/other") as store:
        assert [t.location for t in store.shared] == [f"{tmp_path}/other"]
    with open_store([tmp_path / "x", "memory://y"], local=tmp_path / "z") as store:
        assert store.local.location == str(tmp_path / "z")
        assert len(store.shared) == 2
    with pytest.raises(ConfigError, match="two tiers"):
        open_store([tmp_path / "x", tmp_path / "x"])
