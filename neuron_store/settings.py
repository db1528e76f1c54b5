"""Where artifacts are kept, by environment and settings file, and where each value came from."""

from __future__ import annotations

import errno
import getpass
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from neuron_store.errors import ConfigError, TierError
from neuron_store.policy import CompilePolicy
from neuron_store.tier_url import TierURL, parse_tier_url
from neuron_store.trust import TrustPolicy
from neuron_store.variables import VARIABLES, Sources, warn_about_strangers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Settings",
    "compile_cache_dir",
    "filesystem_type",
    "load_settings",
    "local_root_refused",
]

_log = logging.getLogger(__name__)

_SUBDIRECTORY = Path("neuron", "compile_cache")
_told_about_home = False
# What only another root puts right.
_UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG,
     errno.ELOOP}
)  # fmt: skip


@attrs.frozen
class Settings:
    """What `open_store()` and the command line go by."""

    local_root: Path
    tiers: tuple[TierURL, ...]
    policy: CompilePolicy
    tier_deadline: float
    manifest_dir: str | None
    workers: int
    trust: TrustPolicy
    """Whose signatures count."""
    verify: str
    """When the digests of local artifacts are checked: `always`, `first` or `size`."""
    values: Mapping[str, tuple[Any, str]]
    """Variable to (value, where it came from)."""
    file: str | None = None


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check every setting.

    Raises:
        ConfigError: names the variable, or the file and its key, the value and the remedy.
    """
    environ = os.environ if environ is None else environ
    warn_about_strangers(environ)
    sources = Sources.load(environ)
    values = {name: sources.read(name) for name in VARIABLES}
    urls: list[TierURL] = []
    for name in ("NEURON_LIBTORCH_REMOTE_CACHE", "NEURON_STORE_TIERS"):
        value = values[name][0]
        entries = [(value, {})] if isinstance(value, str) else value or ()
        for text, options in entries:
            try:
                url = parse_tier_url(text, options)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            _add(urls, url)
    return Settings(
        local_root=compile_cache_dir(sources),
        tiers=tuple(urls),
        policy=CompilePolicy.from_sources(sources),
        tier_deadline=values["NEURON_STORE_TIER_DEADLINE"][0],
        manifest_dir=values["VLLM_NEURON_MANIFEST_DIR"][0],
        workers=values["NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS"][0],
        trust=TrustPolicy.from_sources(sources),
        verify=values["NEURON_STORE_VERIFY"][0],
        values=values,
        file=sources.path,
    )


def _add(urls: list[TierURL], url: TierURL) -> None:
    """Naming one tier in both variables is no reason to ask it twice."""
    for position, known in enumerate(urls):
        place = (known.scheme, known.address, known.options)
        if place == (url.scheme, url.address, url.options):
            # What one of them says beyond the other still counts.
            urls[position] = attrs.evolve(
                known,
                name=known.name or url.name,
                read_only=known.read_only or url.read_only,
            )
            return
    urls.append(url)


def compile_cache_dir(sources: Sources) -> Path:
    """The local tier's root.

    `$VLLM_CACHE_ROOT/neuron/compile_cache` when that is set; else below `~/.cache/vllm`; else, with
    the home on a network file system, below `/tmp/vllm_neuron_wdir_$USER`.

    Raises:
        ConfigError: the directory under /tmp is not safely this user's own.
    """
    root, _ = sources.read("VLLM_CACHE_ROOT")
    if root is not None:
        expanded = os.path.expanduser(root)
        if expanded.startswith("~"):
            raise ConfigError(f"VLLM_CACHE_ROOT={root!r}: there is no such user's home")
        return Path(expanded).absolute() / _SUBDIRECTORY
    home = Path(sources.environ.get("HOME") or os.path.expanduser("~"))
    if not home.is_absolute():
        raise ConfigError(f"HOME={str(home)!r} is not an absolute path; set VLLM_CACHE_ROOT")
    kind = filesystem_type(home)
    if not (kind.startswith("nfs") or kind == "lustre"):
        return home / ".cache" / "vllm" / _SUBDIRECTORY
    fallback = Path(f"/tmp/vllm_neuron_wdir_{_user(sources.environ)}")  # noqa: S108  (checked below)
    _tell_about_home(home, kind, fallback)
    own_directory(fallback)
    return fallback / _SUBDIRECTORY


def local_root_refused(error: TierError) -> TierError | ConfigError:
    """The setting at fault, where the local tier's root cannot be made or written; else `error`."""
    if error.operation != "scratch" or error.errno not in _UNUSABLE:
        return error
    settings = load_settings()
    if os.fspath(settings.local_root) != error.location:
        named = f"the local tier's root {error.location}"
    else:
        value, origin = settings.values["VLLM_CACHE_ROOT"]
        named = f"VLLM_CACHE_ROOT={value!r} ({origin})" if value else "the default local root"
        named += f": {error.location}"
    return ConfigError(
        f"{named} cannot be written: {error.reason}; set VLLM_CACHE_ROOT, or --local, to a "
        "directory that can"
    )


def _user(environ: Mapping[str, str]) -> str:
    try:
        user = environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):  # a container's uid without an entry in passwd
        user = str(os.getuid())
    if not user.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"USER={user[:80]!r} cannot be part of a directory's name; set VLLM_CACHE_ROOT"
        )
    return user


def _tell_about_home(home: Path, kind: str, fallback: Path) -> None:
    global _told_about_home  # noqa: PLW0603  (once a process)
    if not _told_about_home:
        _told_about_home = True
        _log.warning(
            "%s is on %s, unfit for the local tier; using %s (set VLLM_CACHE_ROOT to choose)",
            home,
            kind,
            fallback,
        )


def own_directory(path: Path) -> None:
    """Make a directory that only this user can use, or make sure that an existing one is that.

    In a directory like /tmp anybody could have made it first, or put a link there.

    Raises:
        ConfigError: it is a symbolic link, somebody else's, or open to others.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; set VLLM_CACHE_ROOT") from error
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(f"{path} is a symbolic link; remove it, or set VLLM_CACHE_ROOT")
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a directory; remove it, or set VLLM_CACHE_ROOT")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{path} belongs to uid {found.st_uid}, not to this user (uid {os.getuid()}): whoever "
            "owns it could plant artifacts; set VLLM_CACHE_ROOT to a directory of your own"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); "
            f"run: chmod 700 {path}"
        )


def filesystem_type(path: Path) -> str:
    """The type of the file system that `path` is on, as in /proc/mounts; empty when unknown."""
    try:
        real = os.path.realpath(path)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        try:
            mount = fields.split()[4].encode().decode("unicode_escape")
            found = rest.split()[0]
        except (IndexError, UnicodeDecodeError):
            continue
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        # Of two mounts on one directory the later one is seen.
        if inside and len(mount) >= best:
            best, kind = len(mount), found
    return kind
