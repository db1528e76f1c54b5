"""Tells secrets by their names and by their looks, so that a manifest never holds one."""

from __future__ import annotations

import itertools
import re

__all__ = ["MASK", "is_secret_name", "mask_text"]

MASK = "***"

# `HFToken` and `apiKey` are two words each, `max_num_batched_tokens` four.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_ALWAYS = frozenset(
    {"password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"}
    | {"apikey", "accesskey", "accountkey", "privatekey", "secretkey", "signingkey", "sas", "jwt"}
    | {"authtoken", "accesstoken", "refreshtoken", "authorization", "bearer", "cookie", "cookies"}
)
_LAST = frozenset({"token", "tokens", "key", "keys", "auth", "signature", "sig"})
_BEFORE_KEY = frozenset(
    {"api", "access", "private", "secret", "account", "signing", "encryption", "ssh", "auth"}
)
_NUMBERS_PASS = frozenset({"tokens", "keys"})

_USERINFO = re.compile(r"(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@]+@")
_QUERY = re.compile(r"([?&;]([^=&;#\s]{1,80})=)[^&;#\s]*")
_OPTION = re.compile(
    r"((?:^|\s)--?([A-Za-z][A-Za-z0-9_.-]{0,80})(?:=|\s+))(\"[^\"]*\"|'[^']*'|[^\s-]\S*)"
)
_ASSIGNED = re.compile(
    r"((?:^|[\s,;{])[\"']?([A-Za-z][A-Za-z0-9_.-]{0,80})[\"']?\s*[=:]\s*)([\"']?)[^\s,;\"'}&]+\3"
)
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|"
    r"github_pat_[A-Za-z0-9_]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|"
    r"AIza[A-Za-z0-9_-]{30,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"
)
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)[A-Za-z0-9+/._~=-]{8,}", re.IGNORECASE)
_PEM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)


def is_secret_name(name: str, *, number: bool = False) -> bool:
    """Whether a setting of that name holds a secret.

    Args:
        name: `hf_token`, `apiKey`, `AWS_SECRET_ACCESS_KEY`; but not `pad_token_id`, `tokenizer`,
            `num_key_value_heads` or `max_num_batched_tokens`.
        number: the value is a number, which `tokens` and `keys` usually count.
    """
    words = [word.lower() for word in _WORDS.findall(name[:200])]
    if not words:
        return False
    if not _ALWAYS.isdisjoint(words):
        return True
    if words[-1] in _LAST:
        return not (number and words[-1] in _NUMBERS_PASS)
    if any(b == "key" and a in _BEFORE_KEY for a, b in itertools.pairwise(words)):
        return True
    # A token in the middle is one when it is text; ids, types and limits of tokens are numbers.
    return not number and "token" in words and words[-1] in {"value", "string", "text", "header"}


def mask_text(text: str) -> str:
    """The text without passwords in URLs, secret options and assignments, and known token forms."""
    if len(text) < 6:
        return text
    text = _LOOKS.sub(MASK, _BEARER.sub(rf"\1{MASK}", text))
    if "://" in text:
        text = _USERINFO.sub(rf"\1{MASK}@", text)
    if "=" in text and "?" in text:
        text = _QUERY.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)
    if "-" in text:
        text = _OPTION.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)
    if "=" in text or ":" in text:
        text = _ASSIGNED.sub(lambda m: m[1] + MASK if is_secret_name(m[2]) else m[0], text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(MASK, text)
    return text
