"""Secrets inside text: command lines, JSON within JSON, URLs, representations of objects."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from neuron_store.compiler_flags import manifest_flags
from neuron_store.manifest.coercion import to_plain
from neuron_store.manifest.masking import MASK, is_secret_name, mask_text

SECRET = "S3cr3tV4lue"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://user:pw@host/x?token=abc&a=1", "s3://***@host/x?token=***&a=1"),
        ("--api-key=abcdef --verbose=35", "--api-key=*** --verbose=35"),
        ("--hf-token abcdef --x 1", "--hf-token *** --x 1"),
        ("AccountKey=abc123==;EndpointSuffix=x", "AccountKey=***;EndpointSuffix=x"),
        ("Authorization: Bearer abcdefghij", None),
        ("Authorization: token abcdefghij", None),
        ('-H "authorization: Digest a b, c abcdefghij" x', '-H "authorization: ***" x'),
        ("curl -u me:hunter2 https://x", "curl -u me:*** https://x"),
        ("curl --proxy-user 'me:hunter2' x", "curl --proxy-user 'me:***' x"),
        ("docker run -u 1000 x:latest -u root:/x", "docker run -u 1000 x:latest -u root:/x"),
        ("machine h login me password hunter2", "machine h login me password ***"),
        ("my token is hf_" + "a" * 34, "my token is ***"),
        ("AKIA" + "A" * 16, "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("the password is: hunter2", "the password is: ***"),
        ("the password is hunter2, keep it", "the password is ***, keep it"),
        ("glpat-" + "a" * 20, "***"),
        ("use npm_" + "a" * 36 + " here", "use *** here"),
        ("nvapi-" + "a-_" * 20, "***"),
        ("eos_token: </s>, max_tokens=12", "eos_token: </s>, max_tokens=12"),
        ("foo_tokens=12 foo_tokens=x", "foo_tokens=12 foo_tokens=***"),
        ("this token is what was sampled", "this token is what was sampled"),
        ("this token is: abcdef", "this token is: ***"),
        ("torch.bfloat16", "torch.bfloat16"),
        ("--internal-hlo2tensorizer-options=--x=10", "--internal-hlo2tensorizer-options=--x=10"),
    ],
)
def test_secrets_inside_text_are_masked(text, shown):
    masked = mask_text(text)
    if shown is None:
        assert "abcdefghij" not in masked
    else:
        assert masked == shown


@pytest.mark.parametrize(
    "text",
    [
        '{"kv_connector": "x", "kv_connector_extra_config": {"api_key": "@"}}',
        json.dumps({"outer": json.dumps({"api_key": "@", "b": 1})}),
        json.dumps({"outer": json.dumps({"inner": json.dumps({"api_key": "@", "b": 1})})}),
        "env=HF_TOKEN=@",
        "env: HF_TOKEN=@",
        "docker run --env=HF_TOKEN=@ x",
        "x: {api_key: @}",
        "x|api_key=@",
        "Config(host='h', token='@')",
        "[api_key=@]",
        'password: "correct horse @"',
        "password='correct horse @'",
        'api_key="a b @" c',
        "password=a;@",
        "password=a,@",
        "password=a)@",
        '--password "a @',
        "--token -9aB@",
        "--internal='--password=@'",
        "https://h/#access_token=@",
        "https://user:p@ss@host/x".replace("ss@", "@@"),
        "https://user:pa/@@host",
        "https://hooks.slack.com/services/T0/B0/@",
        "xapp-1-A0123456789-@",
        "- name: HF_TOKEN\n  value: @",
        '{"env": [{"name": "HF_TOKEN", "value": "@"}]}',
        json.dumps({"x": '{"name": "HF_TOKEN", "value": "@"}'}),
        "password := @",
        "token => @",
        "Cookie: a=b; session=@",
        "os.environ['HF_TOKEN'] = '@'",
        "<token>@</token>",
        "token='a\\'@'",
        "token: |\n  @",
        "token=$(echo @)",
        "tokens=['a', '@']",
        "SecretStr('@')",
        "sshpass -p @ ssh host",
        "mysql -u me -p@ db",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n@\n-----END PGP PRIVATE KEY BLOCK-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.@",
    ],
)
def test_a_secret_is_found_wherever_it_stands(text):
    """Whatever encloses it, and whatever its value is made of."""
    # The last one is the place: others may be part of the form.
    head, _, tail = text.rpartition("@") if "@@" not in text else text.partition("@@")
    text = head + SECRET + ("@" if "@@" in text else "") + tail
    masked = mask_text(text)
    assert SECRET not in masked
    assert MASK in masked
    assert SECRET not in str(to_plain({"x": [text]}))


def test_what_stands_beside_a_secret_stays():
    text = json.dumps({"a": 1, "token": SECRET, "b": {"api_key": "x", "c": 2}})
    assert mask_text(text) == text.replace(SECRET, MASK).replace('"x"', f'"{MASK}"')
    assert mask_text("password=a, user=b") == "password=***, user=b"
    assert mask_text("password=a,user=b") == "password=***,user=b"
    assert mask_text("{'api_key': 'x', 'b': 2}") == "{'api_key': '***', 'b': 2}"
    assert mask_text("(token=x)") == "(token=***)"


@pytest.mark.parametrize(
    "text",
    [
        "https://h:8080/x@y",
        "https://h:8080?q=a@b",
        "http://[::1]:80/p@x",
        "order=key:size",
        "--sort=key:x",
        "--auth --verbose",
        "--token -O1",
        "api_key=None, hf_token=False, token: null, password=",
        '{"eos_token": "</s>", "tokenizer": "x"}',
    ],
)
def test_what_only_looks_like_a_secret_stays(text):
    assert mask_text(text) == text


@pytest.mark.parametrize(
    "name",
    [
        *("hf_token_2", "TOKEN1", "token_prod", "github_token_ro", "api_key_1", "tls_key_pem"),
        *("passWord", "\uff54\uff4f\uff4b\uff45\uff4e", "tok\u200ben"),
    ],
)
def test_a_number_a_suffix_or_another_script_hides_no_name(name):
    assert is_secret_name(name)
    assert to_plain({name: SECRET}) != {name: SECRET}


def test_names_are_known_in_other_structures_too():
    class Named(NamedTuple):
        host: str
        token: str

    assert to_plain(Named("h", SECRET)) == ["h", MASK]
    assert to_plain({b"authorization": SECRET, b"\xff": 1}) == {
        "authorization": MASK,
        "\\xff": 1,
    }
    assert to_plain({"id": "password", "value": SECRET}) == {"id": "password", "value": MASK}


def test_flags_within_flags_are_masked():
    shown = manifest_flags([f"--internal='--password={SECRET}'", f"--env=HF_TOKEN={SECRET}", "-O1"])
    assert SECRET not in shown
    assert shown.endswith("--env=HF_TOKEN=***' -O1")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text",
    [
        *("a-" * 16000 + "://", "eyJ-" * 8192, "://a:b" * 5000, '"' * 30000, 'token="' * 4000),
        *("token:" * 5000, "=key:" * 6000, "a=," * 10000, "password=a," * 3000, "\\" * 30000),
        *("token: " + "\\" * 30000, "--a " * 8000, "a" + " " * 30000 + "b", "#a=" * 10000),
        *("login " * 5000 + "password", "-u " * 9000 + ":", "token={" + "{" * 30000),
        *("mysql " * 5000 + "-", "name: a value" * 2000, "<a" * 15000, "token=[" * 4000),
        *("token->" * 4000, "name" + " " * 30000, "Cookie:" * 4000, "Secret(" * 4000),
        *("key:" * 8000, "token='" * 4000, "token=$(" * 4000, "token: |" * 4000),
    ],
    ids=lambda text: text[:8],
)
def test_no_text_takes_long_to_mask(text):
    """The time of some of these grew with the square of their length: minutes for these."""
    to_plain([text] * 100)
