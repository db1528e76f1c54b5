"""Compiler flags as the manifest tells them: in their order, without this machine's paths."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["canonical_flags", "split_flags", "strip_machine_paths"]

# Options that name a file or directory of the compiling machine, with their value.
_PATH_OPTIONS = frozenset(
    {"--output", "-o", "--logfile", "--dump", "--cache_dir", "--workdir", "--work-dir", "--tempdir"}
)
# The wrapper keeps these for itself; the compiler never sees them.
_LONE = frozenset({"--no_cache", "--retry_failed_compilation"})
_DROPPED = _PATH_OPTIONS | _LONE | {"--log_level"}
_PATH = re.compile(r"(?:file://)?(?:/|~/|~\Z|\$HOME\b|\$\{HOME\})")
_INNER_PATH = re.compile(r"(?:^|[\s=,:'\"])(?:file://)?(?:/|~/|\$HOME\b|\$\{HOME\})")
_GRAPH = re.compile(r"[^\s=]+\.(?:hlo|pb|mlir|hlo_module\.pb)\Z")


def split_flags(flags: str | Sequence[str]) -> list[str]:
    """The tokens of a command line; a list is taken as it is.

    Text whose quotes do not close is split at blanks, since a manifest tells what was given.
    """
    if not isinstance(flags, str):
        return [str(flag) for flag in flags]
    try:
        return shlex.split(flags)
    except ValueError:
        return flags.split()


def strip_machine_paths(flags: str | Sequence[str]) -> str:
    """The flags quoted for a shell, order kept, without what belongs to one machine.

    Left out: the compiler's own name and its `compile` command, the graph's file, options that
    name an output, log, dump or work directory, options whose value is an absolute path, and the
    wrapper's options (`--cache_dir`, `--no_cache`, ...), which the compiler never sees.
    """
    tokens = split_flags(flags)
    if tokens and tokens[0].rsplit("/", 1)[-1] == "neuronx-cc":
        del tokens[0]
    if tokens and tokens[0] == "compile":
        del tokens[0]
    return shlex.join(_kept(tokens))


def _kept(tokens: list[str]) -> list[str]:
    kept: list[str] = []
    for name, value, joined in _pairs(tokens):
        if not name.startswith("-"):
            # A positional: only the graph and absolute paths are the machine's.
            if not (_PATH.match(name) or _GRAPH.match(name)):
                kept.append(name)
        elif name in _DROPPED:
            continue
        elif value is None:
            kept.append(name)
        elif (cleaned := _clean_value(value)) is not None:
            kept += [f"{name}={cleaned}"] if joined else [name, cleaned]
    return kept


def _pairs(tokens: list[str]) -> list[tuple[str, str | None, bool]]:
    """Options with their value, if any, and whether `=` joins them; positionals by themselves."""
    pairs: list[tuple[str, str | None, bool]] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        following = tokens[position + 1] if position + 1 < len(tokens) else "-"
        name, equals, value = token.partition("=")
        if not token.startswith("-"):
            pairs.append((token, None, False))
        elif equals:
            pairs.append((name, value, True))
        elif name in _LONE or following.startswith("-") or _is_graph_after(name, following):
            pairs.append((name, None, False))
        else:
            pairs.append((name, following, False))
            position += 1
        position += 1
    return pairs


def _is_graph_after(name: str, following: str) -> bool:
    # `--enable-x graph.hlo`: the option has no value, the graph follows it.
    return name not in _DROPPED and _GRAPH.match(following) is not None


def _clean_value(value: str) -> str | None:
    """The value without paths; None when nothing else is in it."""
    if value == "" or _INNER_PATH.search(value) is None:
        return value
    if _PATH.match(value):
        return None
    # Options inside one option's value, such as '--a=1 --dump=/tmp/x': the same rules once more.
    inner = split_flags(value)
    if len(inner) > 1 or value.startswith("-"):
        kept = _kept(inner)
        return shlex.join(kept) if kept else None
    return None


def canonical_flags(flags: str | Sequence[str]) -> dict[str, str]:
    """What of the flags reaches the key: `--k v` equals `--k=v`, and of repeats the last counts.

    The rule of libtorch_neuronx_lite's key; sub-options inside one value keep their order.
    """
    return {
        name: ("True" if value is None and name.startswith("-") else value or "")
        for name, value, _ in _pairs(split_flags(flags))
    }
