"""Every setting's variable: its name in the environment and in the file, its default, its form."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import tomllib
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.abc import check_ttl
from neuron_store.errors import ConfigError
from neuron_store.tier_url import parse_bool, require_file_name, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CONFIG_VARIABLE", "VARIABLES", "Sources", "Variable", "warn_about_strangers"]

_log = logging.getLogger(__name__)

CONFIG_VARIABLE = "NEURON_STORE_CONFIG"
_LARGEST_FILE = 1 << 20
_OURS = re.compile(r"NEURON_STORE_[A-Za-z0-9_]{1,100}\Z")


def _seconds(value: Any, what: str) -> float:
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise ConfigError(f"{what}={shown(value)} is not a positive number of seconds")
    return seconds


def _ttl(value: Any, what: str) -> float:
    return check_ttl(_seconds(value, what), what)


def _count(value: Any, what: str) -> int:
    try:
        count = int(str(value), 10) if not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if not 1 <= count <= 10_000:
        raise ConfigError(f"{what}={shown(value)} is not a whole number from 1 to 10000")
    return count


def _flag(value: Any, what: str) -> bool:
    return parse_bool(value, what=what)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{what}={shown(value)} is not a string")
    return value


def _key_file(value: Any, what: str) -> str:
    text = _text(value, what)
    require_file_name(text, what=what)
    return text


def _promote(value: Any, what: str) -> str:
    if not isinstance(value, str) or value not in {"auto", "explicit"}:
        raise ConfigError(f"{what}={shown(value)} is neither 'auto' nor 'explicit'")
    return value


def _verify(value: Any, what: str) -> str:
    if not isinstance(value, str) or value not in {"always", "first", "size"}:
        raise ConfigError(f"{what}={shown(value)} is none of 'always', 'first' and 'size'")
    return value


def _words(value: Any, what: str) -> tuple[str, ...]:
    """White-space separated, or (in the file) a list of strings."""
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(w, str) and "\0" not in w for w in words):
        raise ConfigError(f"{what} is neither a string nor a list of strings")
    return tuple(words)


def _tiers(value: Any, what: str) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """White-space separated URLs, or (in the file) a list of URLs and tables with a `url`."""
    if isinstance(value, str):
        return tuple((url, {}) for url in value.split())
    if not isinstance(value, list):
        raise ConfigError(f"{what} is neither a string of URLs nor a list")
    tiers: list[tuple[str, Mapping[str, str]]] = []
    for entry in value:
        if isinstance(entry, str):
            tiers.append((entry, {}))
        elif isinstance(entry, dict) and isinstance(entry.get("url"), str):
            options = {k: _option(v, f"{what}: {shown(k)}") for k, v in entry.items() if k != "url"}
            tiers.append((entry["url"], options))
        else:
            raise ConfigError(f"{what}: each tier is a URL or a table with a 'url'")
    return tuple(tiers)


def _option(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > 1 << 63):
        raise ConfigError(f"{what}={shown(value)} is neither a string, a boolean nor a number")
    return str(value)


@attrs.frozen
class Variable:
    """One setting."""

    name: str
    """In the environment."""
    field: str
    """In the TOML file."""
    default: Any
    parse: Callable[[Any, str], Any]
    """(value, what to call it in a `ConfigError`) to the setting's value."""
    about: str


VARIABLES = {
    v.name: v
    for v in (
        Variable(
            "VLLM_CACHE_ROOT",
            "cache_root",
            None,
            _text,
            "vLLM cache root; the local tier is <it>/neuron/compile_cache",
        ),
        Variable(
            "NEURON_LIBTORCH_REMOTE_CACHE",
            "remote_cache",
            None,
            _text,
            "first shared tier: a path or a URL",
        ),
        Variable(
            "NEURON_STORE_TIERS",
            "tiers",
            (),
            _tiers,
            "shared tiers in order, white-space separated URLs",
        ),
        Variable(
            "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE",
            "disable_compile_cache",
            False,
            _flag,
            "no cache at all: each process compiles on its own",
        ),
        Variable(
            "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
            "compilation_timeout",
            600.0,
            _seconds,
            "seconds to wait for another process's compile",
        ),
        Variable(
            "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
            "disable_warmup_compile",
            False,
            _flag,
            "a miss in every tier is an error instead of a compile",
        ),
        Variable(
            "VLLM_NEURON_MANIFEST_DIR",
            "manifest_dir",
            None,
            _text,
            "directory of ledgers and manifests; unset: none are written",
        ),
        Variable(
            "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS",
            "parallel_compile_workers",
            8,
            _count,
            "compiles at once in a precompile, memory permitting",
        ),
        Variable(
            "NEURON_STORE_COMPILE_ATTEMPTS",
            "compile_attempts",
            2,
            _count,
            "compiles in all before those who wait get the error",
        ),
        Variable(
            "NEURON_STORE_TIER_DEADLINE",
            "tier_deadline",
            30.0,
            _seconds,
            "seconds that tiers in trouble may cost a key in all",
        ),
        Variable(
            "NEURON_STORE_PROMOTE",
            "promote",
            "explicit",
            _promote,
            "'auto' promotes each artifact after its compile",
        ),
        Variable(
            "NEURON_STORE_FLEET_LEASE",
            "fleet_lease",
            False,
            _flag,
            "one node in the fleet compiles a key and promotes it, the others wait and fetch",
        ),
        Variable(
            "NEURON_STORE_LEASE_TTL",
            "lease_ttl",
            30.0,
            _ttl,
            "seconds without a sign of life after which a fleet lease is taken over",
        ),
        Variable(
            "NEURON_STORE_TRUSTED_KEYS",
            "trusted_keys",
            (),
            _words,
            "public keys (ed25519:...), files or directories of them, whose signatures count",
        ),
        Variable(
            "NEURON_STORE_REQUIRE_SIGNATURE",
            "require_signature",
            False,
            _flag,
            "nothing comes from a shared tier without a trusted key's signature",
        ),
        Variable(
            "NEURON_STORE_SIGNING_KEY",
            "signing_key",
            None,
            _key_file,
            "private key file that every promotion is signed with",
        ),
        Variable(
            "NEURON_STORE_VERIFY",
            "verify",
            "first",
            _verify,
            "digests of local artifacts: 'always', at the 'first' load, or 'size' only",
        ),
    )
}

# Variables of the Neuron stack's other releases and libraries, with what to set instead.
_STRANGERS = {
    "NEURON_COMPILE_CACHE_URL": "NEURON_STORE_TIERS",
    "NEURON_LIBTORCH_CACHE_ROOT": "VLLM_CACHE_ROOT",
    "NEURON_LIBTORCH_ASSERT_CACHE_HIT": "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
    "VLLM_NEURON_ASSERT_CACHE_HIT": "VLLM_NEURON_DISABLE_WARMUP_COMPILE",
    "VLLM_NEURON_REMOTE_CACHE": "NEURON_LIBTORCH_REMOTE_CACHE",
    "VLLM_NEURON_DISABLE_COMPILE_CACHE": "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE",
    "VLLM_NEURON_COMPILATION_TIMEOUT": "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
    "VLLM_NEURON_PARALLEL_COMPILE_WORKERS": "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS",
}
_warned: set[str] = set()


@attrs.frozen
class Sources:
    """The environment over the settings file, raw."""

    environ: Mapping[str, str]
    file: Mapping[str, Any]
    path: str | None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Sources:
        """Read the file that NEURON_STORE_CONFIG names, if it does.

        Raises:
            ConfigError: the file cannot be read, is not TOML, or has a key that is no setting.
        """
        environ = os.environ if environ is None else environ
        path = environ.get(CONFIG_VARIABLE) or None
        if path is None:
            return cls(environ, {}, None)
        try:
            with open(os.path.expanduser(path), "rb") as file:
                data = file.read(_LARGEST_FILE + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL
            reason = getattr(error, "strerror", None) or error
            # Without the cause, which repeats a name of any length.
            raise ConfigError(f"{CONFIG_VARIABLE}={shown(path)}: {reason}") from None
        if len(data) > _LARGEST_FILE:
            raise ConfigError(
                f"{CONFIG_VARIABLE}={shown(path)} has more than {_LARGEST_FILE} bytes; "
                "name a file of settings"
            )
        try:
            content = tomllib.loads(data.decode())
        # ValueError: TOMLDecodeError, UnicodeDecodeError, and what int() makes of 5000 digits.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{CONFIG_VARIABLE}={shown(path)} is not TOML: {error}") from error
        fields = {v.field for v in VARIABLES.values()}
        for key in content:
            if key not in fields:
                near = difflib.get_close_matches(key[:100], fields, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{path}: unknown setting {shown(key)}{hint} "
                    f"(known: {', '.join(sorted(fields))})"
                )
        return cls(environ, content, path)

    def read(self, name: str) -> tuple[Any, str]:
        """A setting's value and where it came from. An empty variable counts as unset.

        Raises:
            ConfigError: the value does not parse; names the variable, or the file and its key.
        """
        variable = VARIABLES[name]
        if text := self.environ.get(name, "").strip():
            return variable.parse(text, name), "environment"
        if variable.field in self.file:
            where = f"{self.path}: {variable.field}"
            return variable.parse(self.file[variable.field], where), str(self.path)
        return variable.default, "default"


def warn_about_strangers(environ: Mapping[str, str]) -> None:
    """Log, once a process, set variables that look like ours and have no effect."""
    for name in environ:
        if not environ[name] or name in _warned:
            continue
        if name in _STRANGERS:
            _warned.add(name)
            _log.warning("%s is set, and not read by neuron_store; use %s", name, _STRANGERS[name])
        elif _OURS.match(name) and name not in {*VARIABLES, CONFIG_VARIABLE}:
            _warned.add(name)
            near = difflib.get_close_matches(name, [*VARIABLES, CONFIG_VARIABLE], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _log.warning("%s is set, and no setting of neuron_store%s", name, hint)
