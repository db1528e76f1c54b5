"""The address of a tier: what stands in NEURON_STORE_TIERS and on the command line."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from neuron_store.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["TierURL", "parse_bool", "parse_tier_url", "require_file_name", "shown"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BARE_OPTIONS = re.compile(r"\?((?:read_only|name)=[^?]*)\Z")
_USER_INFO = re.compile(r"://[^/?#\s]*@|^[^/]*:[^/]*@|:/[^/]*:[^/]*@")
_SECRET = re.compile(
    r"secret|password|^pw$|^pass$|^pwd$|passwd|token|credential|signature|access_?key|account_?key|api_?key|^key$|^sas|^sig$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(?:secret|password|passwd|token|credential|signature|access_?key|account_?key|api_?key|\bsas|"
    r"\b(?:pw|pass|pwd|key|sig))[^=&?\s]*[\"']?\s*=",
    re.IGNORECASE,
)
_KEY_TEXT = re.compile(r"(?:ed25519:)?[A-Za-z0-9+/]{40,}={0,2}\s*")
_BREAKS = frozenset("\t\r\n")
_TRUE = frozenset({"1", "true", "yes"})
_FALSE = frozenset({"0", "false", "no"})


def shown(value: object, limit: int = 200) -> str:
    """A setting's value for a message: short, and *** where it may hold a credential.

    Of what has parts only the kind is told.
    """
    if isinstance(value, str):
        return "***" if _has_credential(value) else repr(value[:limit])
    # Python refuses to spell an integer of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"


def require_file_name(text: str, *, what: str) -> None:
    """Refuse a key in the place of its file's name, without repeating it.

    Raises:
        ConfigError: it is one; `what` names the setting or option.
    """
    if _is_key_text(text):
        raise ConfigError(
            f"{what} holds a key itself; write it to a file of mode 0600, and name that file"
        )


def _is_key_text(text: str) -> bool:
    """Whether a text that should name a key's file is a key itself, PEM or bare base64."""
    if "PRIVATE KEY" in text or "\n" in text:
        return True
    if _KEY_TEXT.fullmatch(text) is None:
        return False
    # A path may look like it, too.
    above = os.path.dirname(text)
    return not (os.path.lexists(text) or (above and os.path.isdir(above)))


def _has_credential(text: str) -> bool:
    return (
        "PRIVATE KEY" in text
        or _KEY_TEXT.fullmatch(text) is not None
        or _USER_INFO.search(text) is not None
        or _SECRET_VALUE.search(text) is not None
    )


def parse_bool(value: str | bool | int, *, what: str) -> bool:
    """1/0/true/false/yes/no, in any case. `what` names the setting in the `ConfigError`."""
    # From a settings file it may be anything; an integer too long for `str`, too.
    if isinstance(value, str) or value is True or value is False or value in (0, 1):
        text = str(value).strip().lower()
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
    raise ConfigError(f"{what}={shown(value)} is not a boolean; use 1, 0, true, false, yes or no")


@attrs.frozen
class TierURL:
    """One tier's address. Holds no credentials: those come from each cloud's own chain."""

    scheme: str
    address: str
    """What follows the scheme: a path, or `bucket/prefix`."""
    options: Mapping[str, str] = attrs.field(factory=dict)
    """From the query or the settings file, without `name` and `read_only`."""
    name: str | None = None
    read_only: bool = False

    @property
    def location(self) -> str:
        """Scheme and address, safe to log."""
        return (
            self.address if self.scheme in {"posix", "local"} else f"{self.scheme}://{self.address}"
        )

    def checked_options(self, known: Iterable[str]) -> Mapping[str, str]:
        """The options, or a `ConfigError` that names one the tier does not know."""
        names = sorted(known)
        for option in self.options:
            if option not in names:
                raise ConfigError(
                    f"tier {self.location[:200]}: unknown option {shown(option)}; "
                    f"known: {', '.join([*names, 'name', 'read_only'])}"
                )
        return self.options


def parse_tier_url(text: str, extra: Mapping[str, str] | None = None) -> TierURL:
    """Parse a bare path or a URL with options in its query.

    Args:
        text: `/mnt/fsx/cache`, `posix:///mnt/fsx/cache`, `s3://bucket/prefix?read_only=1`.
        extra: options from the settings file; they win over the query's.

    Raises:
        ConfigError: it is empty, relative, or carries credentials (which are not repeated).
    """
    text = text.strip()
    match = _SCHEME.match(text)
    if match is None:
        # A bare path is taken as it is, `?` and `#` being legal in file names; but for the two
        # options that every tier has.
        if not text.startswith(("/", "~")):
            raise ConfigError(
                f"tier {shown(text)} is neither a URL nor an absolute path; "
                "write /mnt/cache, s3://bucket/prefix, ..."
            )
        options = dict(extra or {})
        if found := _BARE_OPTIONS.search(text):
            options = {**dict(parse_qsl(found[1], keep_blank_values=True)), **options}
            text = text[: found.start()]
        return _with_options("posix", text, options)
    scheme = match[1].lower()
    _require_plain(scheme, text)
    try:
        parts = urlsplit(text)
        query = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
    except ValueError:
        raise ConfigError(
            f"tier URL with scheme {scheme!r} cannot be parsed; write {scheme}://address?option=value"
        ) from None
    if parts.fragment:
        raise ConfigError(
            f"tier URL {scheme}://... has a fragment "
            "(#...), which means nothing here; write # as %23 if it belongs to the name"
        )
    address = parts.netloc + parts.path
    user = parts.netloc.rpartition("@")[0]
    # Of abfs it is the container.
    if _USER_INFO.search(address) or (user and (scheme not in {"abfs", "abfss"} or ":" in user)):
        raise ConfigError(
            f"tier URL {scheme}://***@... carries credentials; "
            "take them out: they come from the cloud's own chain (environment, profile, role)"
        )
    if scheme in {"posix", "local"}:
        address = unquote(address)
    elif not address.isprintable():
        raise ConfigError(f"tier URL with scheme {scheme!r} has characters that cannot be shown")
    return _with_options(scheme, address, {**query, **(extra or {})})


def _require_plain(scheme: str, text: str) -> None:
    if len(scheme) > 64:
        raise ConfigError(f"tier URL with a scheme of {len(scheme)} characters; write s3://address")
    if not _BREAKS.isdisjoint(text):
        # Python's parser would leave them out, and so name another place.
        raise ConfigError(f"tier URL with scheme {scheme!r} has a tab or a line break in it")


def _with_options(scheme: str, address: str, options: Mapping[str, str]) -> TierURL:
    where = f"{scheme}://{address[:200]}"
    for option in options:
        if _SECRET.search(option):
            raise ConfigError(
                f"tier {where}: option {shown(option)} looks like a credential; take it out: "
                "credentials come from the cloud's own chain (environment, profile, role)"
            )
    for option, value in options.items():
        if _has_credential(value) or _USER_INFO.search(option):
            raise ConfigError(
                f"tier {where}: option {shown(option)} carries credentials; take them out: "
                "they come from the cloud's own chain (environment, profile, role)"
            )
    rest = {k: v for k, v in options.items() if k not in {"name", "read_only"}}
    return TierURL(
        scheme=scheme,
        address=address,
        options=rest,
        name=options.get("name") or None,
        read_only=parse_bool(options.get("read_only", "0"), what=f"tier {where}: read_only"),
    )
