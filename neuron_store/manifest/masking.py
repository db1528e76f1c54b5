"""Tells secrets by their names and by their looks, so that a manifest never holds one."""

from __future__ import annotations

import itertools
import re
import unicodedata

__all__ = ["MASK", "is_bare_name", "is_secret_name", "mask_text"]

MASK = "***"

# `HFToken` and `apiKey` are two words each, `max_num_batched_tokens` four.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# What may follow the word that says it: `token_2`, `GITHUB_TOKEN_RO`, `tls_key_pem`.
_SUFFIXES = frozenset(
    {"prod", "production", "dev", "devel", "stage", "staging", "test", "testing", "ci", "ro", "rw"}
    | {"read", "write", "old", "new", "current", "previous", "primary", "secondary", "backup"}
    | {"default", "base", "pem", "der", "hex", "str", "raw", "plain", "enc", "encoded"}
)
_ALWAYS = frozenset(
    {"pwd", "credential", "credentials", "passphrase", "passphrases", "passcode", "passkey"}
    | {"sas", "jwt", "authorization", "bearer", "cookie", "cookies"}
)
# Also as the end of a word without a break: `dbpassword`, `clientsecret`.
_ENDS = ("password", "passwords", "passwd", "secret", "secrets")
_LAST = frozenset({"token", "tokens", "key", "keys", "auth", "signature", "sig", "pat"})
_BEFORE_KEY = frozenset(
    {"api", "access", "private", "secret", "account", "signing", "encryption", "ssh", "auth"}
)
# `pass` is a compiler's word, too (`hlo_passes`, `custom_pre_pass`): whose it is must be said.
_BEFORE_PASS = frozenset(
    {"db", "database", "user", "admin", "root", "smtp", "mail", "email", "ftp", "proxy", "http"}
    | {"redis", "mysql", "postgres", "pg", "sql", "mongo", "login", "ldap", "ssl", "tls", "ssh"}
    | {"auth", "basic", "my", "key", "cert", "registry", "docker", "git"}
)
# Tokens of a vocabulary, and counts of them.
_BEFORE_TOKEN = frozenset(
    {"eos", "bos", "pad", "unk", "cls", "sep", "mask", "stop", "start", "end", "begin", "eot"}
    | {"eom", "sot", "image", "video", "audio", "vision", "special", "added", "extra", "reserved"}
    | {"max", "min", "num", "n", "new", "prompt", "completion", "output", "input", "total", "per"}
    | {"batched", "decoder", "encoder", "forced", "draft", "speculative", "spec", "bad", "ignore"}
    | {"lookahead", "prefix", "suffix", "fim", "think", "thinking", "reasoning", "tool", "by"}
    | {"placeholder", "scheduled", "cached", "generated", "allowed", "banned", "sampled", "of"}
    | {"next", "last", "first", "remaining", "accepted", "computed", "padded", "context", "the"}
    | {"decode", "prefill", "skip", "suppress", "bonus", "proposed", "valid", "multimodal", "mm"}
)
# Keys of a mapping, a cache or an attention layer.
_ORDINARY_KEY = frozenset(
    {"cache", "sort", "primary", "foreign", "partition", "graph", "model", "hash", "dict", "state"}
    | {
        "query",
        "value",
        "kv",
        "attention",
        "attn",
        "head",
        "heads",
        "num",
        "row",
        "column",
        "index",
        "router",
        "expert",
        "block",
        "scheduler",
    }
    | {
        "group",
        "lookup",
        "param",
        "params",
        "weight",
        "weights",
        "layer",
        "module",
        "batch",
        "json",
    }
    | {"metadata", "config", "field", "ignore", "ignored", "skip", "missing", "unexpected", "extra"}
    | {"required", "object", "map", "label", "loss", "rope", "quant", "json", "present", "tensor"}
    | {
        "column",
        "mon",
        "don",
        "tur",
        "turn",
        "hoc",
        "joc",
        "whis",
        "hot",
        "lac",
        "flun",
        "smo",
        "jo",
        "po",
    }
)
_HOLDERS = frozenset({"value", "string", "text", "header", "headers"})
_NOTHING = frozenset({"", "none", "null", "nil", "true", "false"})
_NUMBERS_PASS = frozenset({"tokens", "keys"})
_NUMBER = re.compile(r"\s*[+-]?[0-9]+(?:\.[0-9]*)?\s*\Z")

# A password may hold what a URL should have escaped: an `@`, and after a name also a `/`. Searched
# for by what follows the scheme, and bounded: text without an end must not take quadratic time.
_USERINFO = re.compile(
    r"(://)(?:[^/\s?#\"'<>]+|"
    r"[^/\s?#\"'<>@:\[]{0,200}+:(?!\d{1,5}(?:[/?#]|$))[^\s\"'<>@]{1,200}+)@"
)
_QUERY = re.compile(r"([?&;#]([^=&;#\s]{1,80})=)[^&;#\s]*")
# What names a value. The value is looked at only where the name is a secret's, so that what stands
# inside another one's (`--env=HF_TOKEN=x`, JSON within JSON) is found, too.
_NAME = r"([A-Za-z][A-Za-z0-9_.-]{0,80})"
_OPTION = re.compile(rf"(?<![^\s\"'=,])--?{_NAME}(?:=|\s{{1,20}})")
_ASSIGNED = re.compile(
    rf"(?<![^\s,;{{(\[=:|&?\"'\\])[\"']?{_NAME}\\{{0,8}}[\"']?\]?\s{{0,20}}"
    r"(?::=|=>|->|[=:])\s{0,20}"
)
# Name and value told apart, as Kubernetes has them; an element of XML; a wrapper's representation.
_LABELLED = re.compile(
    rf"(?<![A-Za-z0-9_])(?:name|key|variable)[\"'\\]{{0,8}}\s{{0,20}}[:=]\s{{0,20}}[\"'\\]{{0,8}}{_NAME}"
    rf"[\"'\\]{{0,8}},?\s{{0,40}}[\"'\\]{{0,8}}value[\"'\\]{{0,8}}\s{{0,20}}[:=]\s{{0,20}}"
)
_ENCLOSED = re.compile(rf"<{_NAME}>|(?<![A-Za-z0-9_])(Secret[A-Za-z]{{0,20}})\(")
# In quotes, which need not close; in brackets; a block of YAML; else up to a blank, or to where
# something else begins.
_VALUE = re.compile(
    r"""(?P<open>\\*")(?:[^"\\\n]|(?!(?P=open))\\.?|(?!(?P=open))")*(?P<close>(?P=open))?"""
    r"""|(?P<single>')(?:[^'\\\n]|\\.)*(?P<end>')?"""
    r"""|\$?[\[({][^\])}\n]*[\])}]?|[|>][+-]?[ \t]*\n[^\n]*"""
    r"""|(?:(?![,;](?:\s|$|["'{\[]|[A-Za-z][\w.-]{0,80}["']?\s?[=:])|[)\]}](?:[\s,;)\]}"']|$))"""
    r"""[^\s"'&])+"""
)
_SAID = re.compile(
    r"(\b([A-Za-z][A-Za-z0-9_.-]{0,80})\s+(?:is|was)\s*(?:[:=]\s*|\s))([\"']?)[^\s,;\"'}&]+\3"
)
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|"
    r"github_pat_[A-Za-z0-9_]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|"
    r"glpat-[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}|"
    r"pypi-[A-Za-z0-9_-]{40,}|dckr_pat_[A-Za-z0-9_-]{16,}|api_org_[A-Za-z0-9]{20,}|"
    r"gsk_[A-Za-z0-9]{20,}|ya29\.[A-Za-z0-9_-]{20,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|"
    r"xapp-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|"
    # A long header only where nothing stands before it, or each dash would be a place to begin.
    r"(?:eyJ[A-Za-z0-9_-]{10,300}|(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,})"
    r"\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"
)
_HOOK = re.compile(r"(\bhooks\.slack\.com/|\bdiscord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+")
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)[A-Za-z0-9+/._~=-]{8,}", re.IGNORECASE)
# Whatever the scheme, and however many words.
_AUTHORIZATION = re.compile(
    r"(\b(?:authorization|cookie)[\"']?\s*[:=]\s*[\"']?)[^\"'\r\n]+", re.IGNORECASE
)
# `curl -u name:x`, and a line of a `.netrc`.
_PAIRS = re.compile(r"((?:^|\s)(?:-u\s*|--(?:proxy-)?user[ =])[\"']?[^\s:\"'/]+:)[^\s\"'/]+")
_PASSED = re.compile(r"(\b(?:sshpass|mysql\w{0,20}|mariadb\w{0,20})\s(?:[^\n]{0,200}?\s)?-p)\s?\S+")
_NETRC = re.compile(r"(\blogin\s+\S+\s+password\s+)\S+")
_PEM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)


def is_secret_name(name: str, *, value: object = None) -> bool:
    """Whether a setting of that name holds a secret.

    Args:
        name: `hf_token`, `HFTOKEN`, `apiKey`, `AWS_SECRET_ACCESS_KEY`, `db_pass`; but not
            `eos_token`, `tokenizer`, `num_key_value_heads` or `max_num_batched_tokens`.
        value: what it holds, where that is known: a number under `tokens` or `keys` counts them.
    """
    words = [word.lower() for word in _WORDS.findall(_ascii(name[:200]))]
    if not words:
        return False
    # Together, too: `passWord`.
    if any(word in _ALWAYS or word.endswith(_ENDS) for word in [*words, "".join(words)]):
        return True
    words = _without_suffixes(words)
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in {"token", "tokens"} and before in _BEFORE_TOKEN:
        return False
    if last in {"key", "keys"} and before in _ORDINARY_KEY:
        return False
    if last in _LAST:
        return not (last in _NUMBERS_PASS and _is_number(value))
    if last == "pass" and (not before or before in _BEFORE_PASS):
        return True
    if any(map(_is_glued, words)):
        return True
    if any(b == "key" and a in _BEFORE_KEY for a, b in itertools.pairwise(words)):
        return True
    # A token in the middle is one when it is text; ids, types and limits of tokens are numbers.
    return last in _HOLDERS and not {"token", "auth"}.isdisjoint(words) and not _is_number(value)


def _without_suffixes(words: list[str]) -> list[str]:
    end = len(words)
    while end > 1 and (words[end - 1].isdigit() or words[end - 1] in _SUFFIXES):
        end -= 1
    return words[:end]


def _ascii(name: str) -> str:
    """Without what looks like another name and reads the same: full width, joiners of no width."""
    if name.isascii():
        return name
    return "".join(
        c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf"
    )


def is_bare_name(name: str) -> bool:
    """Whether a secret's name is a single word that also means something else: `key`, `token`."""
    return name.lower() in _LAST or name.lower() == "pass"


def _is_glued(word: str) -> bool:
    """`hftoken`, `sshkey`, `dbpass`: two words in one."""
    single = word.removesuffix("s") if not word.endswith("pass") else word
    for end, known in (("token", _BEFORE_TOKEN), ("key", _ORDINARY_KEY)):
        if single.endswith(end) and single != end:
            return single.removesuffix(end) not in known
    return word.endswith("pass") and word.removesuffix("pass") in _BEFORE_PASS


def _is_number(value: object) -> bool:
    # By the type: `isinstance` asks a foreign object too, and that may raise.
    if issubclass(type(value), (int, float)):
        return True
    return type(value) is str and _NUMBER.match(value) is not None


def mask_text(text: str) -> str:
    """The text without passwords in URLs, secret options and assignments, and known token forms."""
    if len(text) < 6:
        return text
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    text = _LOOKS.sub(MASK, _BEARER.sub(rf"\1{MASK}", text))
    if "/" in text:
        text = _HOOK.sub(rf"\1{MASK}", _USERINFO.sub(rf"\1{MASK}@", text))
    if "=" in text and ("?" in text or "#" in text):
        text = _QUERY.sub(_masked, text)
    if "password" in text:
        text = _NETRC.sub(rf"\1{MASK}", text)
    if "-" in text:
        text = _PASSED.sub(rf"\1{MASK}", _PAIRS.sub(rf"\1{MASK}", text))
        text = _mask_after(_OPTION, text)
    if "=" in text or ":" in text or "->" in text:
        text = _mask_after(_ASSIGNED, _mask_after(_LABELLED, text))
    if "<" in text or "Secret" in text:
        text = _mask_after(_ENCLOSED, text)
    if " is" in text or " was" in text:
        text = _SAID.sub(_said, text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(MASK, text)
    return text


def _mask_after(heads: re.Pattern[str], text: str) -> str:
    """The text without the values of what `heads` names, where that is a secret."""
    kept: list[str] = []
    end = 0
    for head in heads.finditer(text):
        if head.start() < end:
            continue  # inside a value that is gone
        before, name = text[max(0, head.start() - 1) : head.start()], head[head.lastindex or 0]
        # `order=key:size` names no secret; where a new word begins, `key: ...` does.
        inside = before in {"=", ":"} and name.lower() in {"key", "keys"}
        if inside or not is_secret_name(name):
            continue  # and its value is not looked at: that may be all the rest
        value = _VALUE.match(text, head.end())
        if value is None or (heads is _OPTION and not _is_argument(head[0], value[0])):
            continue
        bare = value[0].strip("\\\"'")
        if _holds_secret(name, bare):
            opened = value["open"] or value["single"] or ""
            closed = value["close"] or value["end"] or ""
            kept += [text[end : head.end()], opened, MASK, closed]
            end = value.end()
    return "".join([*kept, text[end:]])


def _holds_secret(name: str, value: str) -> bool:
    # That there is none is no secret: `api_key=None`, `token: false`.
    return value.lower() not in _NOTHING and is_secret_name(name, value=value)


def _is_argument(option: str, value: str) -> bool:
    """Whether what follows an option is its value, and not the next option."""
    return option.endswith("=") or not value.startswith("-") or bool(_DASHED.fullmatch(value))


# A token may begin with a dash (one of base64url in 64 does); options have two, or a few letters.
_DASHED = re.compile(r"-(?=[^-])(?=[^=]*\d)(?=[^=]*[A-Z])[^=]{11,}")


def _masked(match: re.Match[str]) -> str:
    """What stands after a secret's name, masked."""
    whole, name = match[0], match[2]
    value = whole[len(match[1]) :].strip("\"'")
    return match[1] + MASK if _holds_secret(name, value) else whole


def _said(match: re.Match[str]) -> str:
    # "The key is missing" says nothing secret; "the password is x" does, and "the key is: x".
    if is_bare_name(match[2]) and ":" not in match[1] and "=" not in match[1]:
        return match[0]
    return _masked(match)
