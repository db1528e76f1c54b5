"""Compiler flags: how they are read, what of them a key holds, and how a manifest tells them."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NEURONX_CC",
    "Flag",
    "FlagDialect",
    "canonical_flags",
    "check_flags",
    "last_value",
    "manifest_flags",
    "parse_flags",
    "recorded_flags",
    "settled_flags",
]

_PATH_MARK = "@path"
_LONGEST = 64 << 10
"""Characters of one string of flags: shlex takes a time that grows with the square of a token."""


@attrs.frozen
class Flag:
    """One option of a command line, with the tokens that it was written as."""

    name: str
    """With its dashes, synonyms unified; empty for a positional argument."""
    value: str | None
    """None for a switch; the argument itself for a positional one."""
    tokens: tuple[str, ...]


@attrs.frozen
class FlagDialect:
    """How one compiler reads its command line, as far as keys depend on it."""

    synonyms: Mapping[str, str] = attrs.field(factory=dict)
    """Other spellings of an option, each to the one that keys use."""
    joined: tuple[str, ...] = ()
    """Short options that may carry their value without a blank, as in `-O1`."""
    valued: frozenset[str] = frozenset()
    """Options that always take a value, even one that starts with a dash."""
    switches: re.Pattern[str] = re.compile(r"(?!)")
    """Options that never take a value, so that what follows is an argument of its own."""
    machine: frozenset[str] = frozenset()
    """Options that say where on this machine something lies. They are in no key."""
    wrapper: frozenset[str] = frozenset()
    """Options of a wrapper, which never reach the compiler."""
    log: frozenset[str] = frozenset()
    """Options that say only how much is told of the work. They are in no key."""
    opposites: tuple[str, str] | None = None
    """Prefixes that switch one thing on and off; the right-most of the two wins."""
    repeats_add_up: bool = False
    """Whether a repeated option adds to the earlier one (the order among them is kept then)
    instead of replacing it."""
    graph_suffixes: tuple[str, ...] = ()
    """What the name of a graph ends in: such an argument is the input, and in no key."""

    def group(self, name: str) -> str:
        """The name under which an option replaces earlier ones."""
        if self.opposites is not None and name.startswith(self.opposites[1]):
            return self.opposites[0] + name.removeprefix(self.opposites[1])
        return name

    @property
    def keyless(self) -> frozenset[str]:
        """Options that do not change the artifact."""
        return self.machine | self.wrapper | self.log


NEURONX_CC = FlagDialect(
    synonyms={
        "-O": "--optlevel",
        "-o": "--output",
        "-lnc": "--logical-nc-config",
        "--lnc": "--logical-nc-config",
        "--cache-dir": "--cache_dir",
        "--work-dir": "--workdir",
        "--work_dir": "--workdir",
    },
    joined=("-O",),
    valued=frozenset(
        {
            "--auto-cast",
            "--auto-cast-type",
            "--cache_dir",
            "--distribution-strategy",
            "--dump",
            "--execute-repetition",
            "--framework",
            "--hbm-scratchpad-page-size",
            "--internal-backend-options",
            "--internal-dma-order-constraints",
            "--internal-hlo2tensorizer-options",
            "--log_level",
            "--logfile",
            "--logical-nc-config",
            "--model-type",
            "--optlevel",
            "--output",
            "--target",
            "--tempdir",
            "--tensorizer-options",
            "--verbose",
            "--workdir",
        }
    ),
    switches=re.compile(r"--(?:enable|disable)-[^=]*\Z|--no_cache\Z|--retry_failed_compilation\Z"),
    machine=frozenset({"--cache_dir", "--dump", "--logfile", "--output", "--tempdir", "--workdir"}),
    wrapper=frozenset({"--cache_dir", "--log_level", "--no_cache", "--retry_failed_compilation"}),
    # The Neuron stack's own cache (`MODULE_<graph>+<flags>`) has it in no hash either.
    log=frozenset({"--verbose"}),
    opposites=("--enable-", "--disable-"),
    graph_suffixes=(".hlo", ".hlo.pb", ".hlo_module.pb", ".pb"),
)
"""neuronx-cc, from its command-line reference and from what public callers pass to it."""


def parse_flags(flags: Sequence[str] | str, dialect: FlagDialect = NEURONX_CC) -> list[Flag]:
    """The options of a command line in their order; a string is split as a shell would.

    `--k v` is one option when `v` cannot be an option itself or `--k` is known to take a value.

    Raises:
        ConfigError: an unbalanced quote, a string of more than 64 Ki characters, or something that
            is not text.
    """
    tokens = _tokens(flags)
    found: list[Flag] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not _is_option(token):
            found.append(Flag("", token, (token,)))
            continue
        name, equals, value = token.partition("=")
        name = dialect.synonyms.get(name, name)
        if equals:
            found.append(Flag(name, value, (token,)))
            continue
        short = next((s for s in dialect.joined if token.startswith(s) and token != s), None)
        if short is not None and not token.startswith("--"):
            name = dialect.synonyms.get(short, short)
            found.append(Flag(name, token.removeprefix(short), (token,)))
            continue
        if at < len(tokens) and _takes(name, tokens[at], dialect):
            found.append(Flag(name, tokens[at], (token, tokens[at])))
            at += 1
        else:
            found.append(Flag(name, None, (token,)))
    return found


def check_flags(flags: Sequence[str] | str, dialect: FlagDialect = NEURONX_CC) -> None:
    """Refuse what no compiler can be given, before a key is made of it.

    Raises:
        ConfigError: names the flag: a NUL in it, several words in one, an option without the value
            that it must have; and as `parse_flags`.
    """
    for flag in parse_flags(flags, dialect):
        shown = shlex.join(flag.tokens)[:200]
        if any("\0" in token for token in flag.tokens):
            raise ConfigError(f"compiler flag {shown!r} has a NUL character in it; take it out")
        if flag.name and any(c.isspace() for c in flag.tokens[0].partition("=")[0]):
            raise ConfigError(
                f"compiler flag {shown} is several words in one; in a list each word is an item of "
                "its own"
            )
        if flag.name in dialect.valued and flag.value is None:
            raise ConfigError(f"compiler flag {shown} has no value; write {flag.name}=VALUE")
        if flag.tokens[0] in dialect.joined and _is_option(flag.value or ""):
            raise ConfigError(
                f"compiler flag {shown}: {flag.value} is no value; write {flag.name}=VALUE"
            )


def settled_flags(flags: Sequence[str] | str, dialect: FlagDialect = NEURONX_CC) -> dict[str, str]:
    """What of each option counts in the end, by the name under which it replaces earlier ones.

    Each text is `--name=value` or `--name`; options that add up are joined for a shell. Left out is
    what `canonical_flags` leaves out, and arguments that are no options.

    Raises:
        ConfigError: as `parse_flags`.
    """
    options, _ = _settled(flags, dialect)
    return {
        name: texts[0] if len(texts) == 1 else shlex.join(texts) for name, texts in options.items()
    }


def canonical_flags(
    flags: Sequence[str] | str,
    *,
    target: str | None = None,
    dialect: FlagDialect = NEURONX_CC,
) -> str:
    """One text for all command lines that make the same artifact; `shlex.split` takes it apart.

    A list and a string, `--k v` and `--k=v`, synonyms, and any order of different options give the
    same. Of repeats the right-most counts. The order inside a value is kept. Options that name
    places on this machine or the detail of a log, options of a wrapper and the graph's own path are
    left out; from any other value the paths below a home, cache, work or temporary directory are.

    Args:
        flags: what the compiler gets.
        target: the resolved platform target, which overrides every `--target` among the flags.
        dialect: how the compiler reads them.

    Raises:
        ConfigError: as `check_flags`.
    """
    check_flags(flags, dialect)
    options, arguments = _settled(flags, dialect)
    if target is not None:
        options["--target"] = [f"--target={target}"]
    ordered = [text for name in sorted(options) for text in options[name]]
    return shlex.join([*ordered, *arguments])


def _settled(
    flags: Sequence[str] | str, dialect: FlagDialect
) -> tuple[dict[str, list[str]], list[str]]:
    kept: dict[str, list[str]] = {}
    arguments: list[str] = []
    home = _machine_paths()
    for index, flag in enumerate(parse_flags(flags, dialect)):
        if flag.name in dialect.keyless:
            continue
        if flag.name == "":
            assert flag.value is not None
            if not _is_input(flag.value, index, dialect.graph_suffixes):
                arguments.append(home.sub(_PATH_MARK, flag.value))
            continue
        text = flag.name if flag.value is None else f"{flag.name}={flag.value}"
        group = dialect.group(flag.name)
        if not dialect.repeats_add_up:
            kept.pop(group, None)
        kept.setdefault(group, []).append(home.sub(_PATH_MARK, text))
    return kept, arguments


def last_value(
    flags: Sequence[str] | str, name: str, dialect: FlagDialect = NEURONX_CC
) -> str | None:
    """The value of the right-most option of that name; empty for a switch, None without one.

    Raises:
        ConfigError: as `parse_flags`.
    """
    given = [flag.value for flag in parse_flags(flags, dialect) if flag.name == name]
    return (given[-1] or "") if given else None


def recorded_flags(flags: Sequence[str] | str) -> list[str]:
    """The tokens of flags that somebody recorded; a list is taken as it is.

    Text whose quotes do not close, or of more than 64 Ki characters, is split at blanks: it is no
    request that could be put right, and what was recorded must not be lost.
    """
    if not isinstance(flags, str):
        return [str(flag) for flag in flags]
    if len(flags) > _LONGEST:
        return flags.split()
    try:
        return shlex.split(flags)
    except ValueError:
        return flags.split()


def manifest_flags(argv: Sequence[str] | str, dialect: FlagDialect = NEURONX_CC) -> str:
    """A command line as a manifest shows it: in its order, without what belongs to this machine.

    Left out are the program and its sub-command, the graph's path, options of a wrapper, options
    that name places on this machine, and whatever else has an absolute path for its value. Such a
    path inside a value becomes `@path`. More goes than from a key, which must tell two libraries
    below `/opt` apart: manifests of two machines are meant to be compared. Secrets are masked.
    Never raises.
    """
    shown: list[str] = []
    for index, flag in enumerate(parse_flags(recorded_flags(argv), dialect)):
        if flag.name in dialect.machine or flag.name in dialect.wrapper:
            continue
        if flag.name == "" and _is_input(flag.value or "", index, _GRAPHS):
            continue
        if flag.value is not None and _ABSOLUTE.fullmatch(flag.value):
            continue
        shown.extend(map(_without_paths, _without_secrets(flag)))
    return shlex.join(shown)


def _without_paths(token: str) -> str:
    head = 2 if _GLUED.match(token) else 0
    return token[:head] + _ABSOLUTE.sub(_PATH_MARK, token[head:])


def _without_secrets(flag: Flag) -> Sequence[str]:
    from neuron_store.manifest.masking import (  # noqa: PLC0415  (only the emitter asks)
        MASK,
        is_secret_name,
        mask_text,
    )

    name, equals, _ = flag.tokens[0].partition("=")
    if flag.name and flag.value is not None and is_secret_name(name, value=flag.value):
        return [f"{name}={MASK}"] if equals else [name, MASK]
    return [mask_text(token) for token in flag.tokens]


# Of any compiler: a manifest does not say whose flags it tells.
_GRAPHS = (*NEURONX_CC.graph_suffixes, ".mlir", ".mlirbc")
# At the start or after what may stand before a value; `s3://bucket` is the same on every machine.
_ABSOLUTE = re.compile(
    r"(?:(?<![^\s=,;:'\"(\[{|<])(?:file://)?(?:/(?!/)|~/|\$HOME\b|\$\{HOME\})[^\s,;:'\")\]}|>]*|(?<!.)~\Z)"
)
# `-I/usr/include`
_GLUED = re.compile(r"-[A-Za-z](?=[/~$])")


def _tokens(flags: object) -> list[str]:
    if isinstance(flags, str):
        if len(flags) > _LONGEST:
            raise ConfigError(
                f"compiler flags of {len(flags)} characters; at most {_LONGEST} are split, "
                "so give a list"
            )
        try:
            return shlex.split(flags)
        except ValueError as error:
            raise ConfigError(
                f"compiler flags {flags[:200]!r} cannot be split ({error}); balance the quotes, "
                "or give a list"
            ) from None
    # A set has no order, and the keys of a mapping are no command line.
    if not isinstance(flags, Sequence) or isinstance(flags, bytes | bytearray):
        raise ConfigError(
            f"compiler flags {flags!r:.200} are {type(flags).__name__}; give a list of strings, "
            "or one string that is split as a shell would"
        )
    tokens = list(flags)
    for token in tokens:
        if not isinstance(token, str):
            raise ConfigError(
                f"compiler flag {token!r} is {type(token).__name__}; flags are strings"
            )
    return tokens


def _is_option(token: str) -> bool:
    # A negative number is a value; a lone dash is a file.
    return token.startswith("-") and token.strip("-") != "" and not token[1].isdigit()


def _takes(name: str, following: str, dialect: FlagDialect) -> bool:
    if name in dialect.valued:
        return True
    if dialect.switches.match(name):
        return False
    return not _is_option(following) and not following.endswith(dialect.graph_suffixes)


def _is_input(argument: str, index: int, graphs: tuple[str, ...]) -> bool:
    """Whether an argument is the graph or, among the first two, the program or its sub-command."""
    if argument.endswith(graphs):
        return True
    return index < 2 and (argument == "compile" or os.path.basename(argument) == "neuronx-cc")


def _machine_paths() -> re.Pattern[str]:
    """Matches a path below a home, cache, work or temporary directory, alone or inside a value."""
    roots = {
        "/dev/shm",  # noqa: S108  (recognised, never opened)
        "/home",
        "/root",
        "/run/user",
        "/scratch",
        "/tmp",  # noqa: S108  (recognised, never opened)
        "/Users",
        "/var/cache",
        "/var/folders",
        "/var/tmp",  # noqa: S108  (recognised, never opened)
    }
    named = [os.environ.get(n) for n in ("HOME", "TMPDIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")]
    roots.update(r.rstrip("/") for r in (*named, tempfile.gettempdir()) if r and r.startswith("/"))
    choice = "|".join(re.escape(root) for root in sorted(roots - {""}, key=lambda r: (-len(r), r)))
    # After a path component's character it is the inside of a longer path, not a root.
    return re.compile(rf"(?<![\w./-])(?:{choice})(?:/[^\s,;:'\"]*|(?![\w./-]))")
