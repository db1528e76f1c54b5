from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_store.compiler_flags import (
    canonical_flags,
    last_value,
    manifest_flags,
    parse_flags,
    recorded_flags,
    settled_flags,
)
from neuron_store.errors import ConfigError

SAME = [
    ["-O1", "-O 1", "--optlevel=1", "--optlevel 1", ["-O1"], ["-O", "1"], "-O=1", "-O2 -O1"],
    ["-lnc 2", "--lnc=2", "--lnc 2", "-lnc=2", "--logical-nc-config=2", "--logical-nc-config 2"],
    [
        "--auto-cast=none -O1",
        "-O1 --auto-cast none",
        ["--auto-cast=none", "-O1"],
        "--auto-cast=all --auto-cast=none -O1",
        "--cache_dir=/x --auto-cast=none --no_cache -O1 --retry_failed_compilation --log_level 3",
        "neuronx-cc compile /work/a/graph.hlo --auto-cast=none -O1 --output=/w/graph.neff",
        "--auto-cast=none --verbose=35 -O1",
        "--verbose info --auto-cast none -O1",
        "--logfile /w/log.txt --dump /elsewhere --workdir=/w -O1 --auto-cast none m.hlo_module.pb",
    ],
    [
        "--tensorizer-options='--a=1 --b'",
        ["--tensorizer-options", "--a=1 --b"],
        ["--tensorizer-options=--a=1 --b"],
        "--tensorizer-options=--z --tensorizer-options='--a=1 --b'",
    ],
    ["--k=--v", ["--k=--v"]],
    ["--log=/tmp/a/b", "--log=/home/bob/x", "--log /var/tmp/neuron-compile-cache", "--log=/root"],
    ["--o='--in=/tmp/a --z=1'", "--o='--in=/home/b --z=1'"],
    ["--enable-x graph.hlo", "--enable-x", "--disable-x --enable-x"],
    ["", [], "graph.hlo", "--output=x"],
]


@pytest.mark.parametrize("group", SAME, ids=[str(g[0]) for g in SAME])
def test_command_lines_that_mean_the_same_have_one_form(group):
    assert len({canonical_flags(flags) for flags in group}) == 1


def test_groups_of_flags_that_differ_in_meaning_differ_in_form():
    assert len({canonical_flags(group[0]) for group in SAME}) == len(SAME)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-O1", "-O2"),
        ("-O1", ""),
        ("--k=v", "--k=V"),
        ("--k=1 --j=2", "--k=2 --j=1"),
        ("--k=", "--k"),
        ("--k", "--k=True"),
        ("--o='--a --b'", "--o='--b --a'"),
        ("--o='--a --b'", "--o=--a --b"),
        ("--k=1 --k=2", "--k=2 --k=1"),
        ("--enable-x --disable-x", "--disable-x --enable-x"),
        ("--lib=/opt/a.so", "--lib=/opt/b.so"),
        ("--lib=/tmp/a.so", ""),
        ("--o=/opt/tmp/a", "--o=/opt/tmp/b"),
        ("stray", ""),
        ("--level -1", "--level -2"),
    ],
)
def test_command_lines_that_differ_have_different_forms(one, other):
    assert canonical_flags(one) != canonical_flags(other)


def test_the_resolved_target_overrides_the_one_among_the_flags():
    for flags in (
        "--target=trn1 -O1",
        "-O1 --target trn1",
        "-O1",
        "--target inf2 --target=trn1 -O1",
    ):
        assert canonical_flags(flags, target="trn2") == "--optlevel=1 --target=trn2"
    assert canonical_flags("--target trn1") == "--target=trn1"


def test_a_flag_known_as_a_switch_leaves_the_next_argument_alone():
    found = parse_flags("--enable-fast-context-switch other --internal-enable-dge-levels vector")
    assert [(f.name, f.value) for f in found] == [
        ("--enable-fast-context-switch", None),
        ("", "other"),
        ("--internal-enable-dge-levels", "vector"),
    ]


def test_a_value_may_start_with_a_dash_where_the_option_is_known_or_it_is_a_number():
    found = parse_flags(
        ["--internal-backend-options", "--x=1 --y", "--threshold", "-3", "--z", "-O1"]
    )
    assert [(f.name, f.value) for f in found] == [
        ("--internal-backend-options", "--x=1 --y"),
        ("--threshold", "-3"),
        ("--z", None),
        ("--optlevel", "1"),
    ]


options = st.sampled_from(["--aa", "--bb", "--cc", "--model-type", "--auto-cast", "--target"])
texts = st.text(alphabet="ab-=' \"/$\\", max_size=8)


@given(st.lists(st.tuples(options, texts), max_size=6))
def test_the_canonical_form_is_its_own_canonical_form(pairs):
    once = canonical_flags([f"{name}={value}" for name, value in pairs])
    assert canonical_flags(once) == once
    assert canonical_flags(shlex.split(once)) == once


@given(st.dictionaries(options, texts, max_size=5), st.randoms())
def test_neither_order_nor_the_way_of_quoting_matters(pairs, random):
    names = list(pairs)
    random.shuffle(names)
    tokens = [f"{name}={pairs[name]}" for name in names]
    expected = canonical_flags([f"{name}={value}" for name, value in pairs.items()])
    assert canonical_flags(tokens) == expected
    assert canonical_flags(shlex.join(tokens)) == expected


@given(st.lists(st.tuples(options, texts), min_size=1, max_size=8))
def test_of_repeats_the_right_most_counts_and_no_value_is_lost(pairs):
    form = shlex.split(canonical_flags([f"{name}={value}" for name, value in pairs]))
    assert dict(token.split("=", 1) for token in form) == dict(pairs)


@pytest.mark.parametrize(
    "flags",
    ["--k='open", ["--k", 3], [b"-O1"], None, 5, {"--k": "v"}, {"--k=v"}, b"-O1", iter(["-O1"])],
)
def test_flags_that_cannot_be_read_are_refused(flags):
    with pytest.raises(ConfigError, match="flag"):
        canonical_flags(flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--k=a\0b"], "NUL"),
        (["--k", "a\0b"], "NUL"),
        (["--logfile=a\0b"], "NUL"),
        (["--optlevel 1"], "several words in one"),
        (["-k=1", "-O1 --auto-cast=none"], "several words in one"),
        (["-O1 --no-x"], "several words in one"),
        ("-k=1 -O", "no value; write --optlevel=VALUE"),
        ("--auto-cast", "no value; write --auto-cast=VALUE"),
        ("-O --auto-cast=none", "--auto-cast=none is no value"),
    ],
)
def test_flags_that_no_compiler_can_be_given_have_no_canonical_form(flags, said):
    with pytest.raises(ConfigError, match=said):
        canonical_flags(flags)


def test_recorded_flags_that_have_no_canonical_form_are_shown_all_the_same():
    assert manifest_flags("-k=1 -O") == "-k=1 -O"
    assert manifest_flags(["--optlevel 1"]) == "'--optlevel 1'"


def test_the_manifest_shows_the_flags_in_their_order_without_this_machine():
    argv = [
        "/opt/bin/neuronx-cc", "compile", "/home/x/graph.hlo",
        "--framework", "XLA", "--target", "trn2", "--output", "/home/x/graph.neff",
        "--logfile", "/home/x/log.txt", "--cache_dir=/c", "--no_cache",
        "--auto-cast=none", "-O2", "--internal-backend-options=--a=1 --b=/tmp/z",
        "--scratch", "/tmp/t",
    ]  # fmt: skip
    assert manifest_flags(argv) == (
        "--framework XLA --target trn2 --auto-cast=none -O2 "
        "'--internal-backend-options=--a=1 --b=@path'"
    )


def test_the_manifest_keeps_repeats_and_spelling():
    assert manifest_flags("-O1 --lnc=2 -O 2 --a=1 --a=2") == "-O1 --lnc=2 -O 2 --a=1 --a=2"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            "neuronx-cc compile /c/k/graph.hlo --framework XLA --output /c/g.neff --logfile l -O2",
            "--framework XLA -O2",
        ),
        ("--output=/a/b.neff --logfile=log-neuron-cc.txt -O1 -o x", "-O1"),
        ("--dump /tmp/dump --a --workdir=relative/dir --b --tempdir t", "--a --b"),
        ("--cache_dir=s3://b/x --no_cache --retry_failed_compilation --log_level 3 --k", "--k"),
        ("--enable-x graph.hlo --y", "--enable-x --y"),
        ("--iree-opt-level=O3 prefill.mlir", "--iree-opt-level=O3"),
        ("--config=/opt/cfg.json --y=~/x --z='$HOME/q' --v=~ --keep=a/b", "--keep=a/b"),
        ("--seed-file /etc/seed --y=1 /opt/stray", "--y=1"),
        ("--url=s3://bucket/x --of=file:///etc/x", "--url=s3://bucket/x"),
        ("--in='--a=10 --dump=/data/x --b=1,/srv/y;2'", "'--in=--a=10 --dump=@path --b=1,@path;2'"),
        ("--a=b~ --ratio=1/2", "'--a=b~' --ratio=1/2"),
        ("", ""),
    ],
)
def test_the_manifest_tells_no_path_of_any_machine_and_keeps_the_order(given, kept):
    assert manifest_flags(given) == kept
    assert manifest_flags(kept) == kept


def test_values_with_blanks_stay_quoted_and_are_never_split():
    given = [
        "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
        "--tensorizer-options=--x='a b' --y",
    ]
    assert shlex.split(manifest_flags(given)) == given
    assert manifest_flags(shlex.join(given)) == manifest_flags(given)


def test_what_was_recorded_with_an_open_quote_is_told_and_not_refused():
    assert recorded_flags("--a 'unclosed") == ["--a", "'unclosed"]
    assert "unclosed" in manifest_flags("--a 'unclosed")


@given(st.lists(st.text(max_size=12), max_size=6))
def test_the_manifest_takes_any_text(tokens):
    assert isinstance(manifest_flags(tokens), str)
    assert isinstance(manifest_flags(" ".join(tokens)), str)


def test_what_counts_of_each_option_goes_by_the_name_that_keys_use():
    assert settled_flags("--b 2 -O1 --output x -O2 --lone --disable-y x.hlo") == {
        "--b": "--b=2",
        "--optlevel": "--optlevel=2",
        "--lone": "--lone",
        "--enable-y": "--disable-y",
    }


@pytest.mark.parametrize(
    ("flags", "value"),
    [("--target trn1 --target=trn2", "trn2"), ("--target", ""), ("-O1", None), ([], None)],
)
def test_the_last_value_of_an_option(flags, value):
    assert last_value(flags, "--target") == value


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--token=hf_abc --target trn2", "'--token=***' --target trn2"),
        ("--hf-token hf_abc -O1", "--hf-token '***' -O1"),
        (["--note", "sent by hf_" + "a" * 34], "--note 'sent by ***'"),
        ("--url=s3://user:pw@host/x", "'--url=s3://***@host/x'"),
        ("--max-tokens=12 --pass-through=x", "--max-tokens=12 --pass-through=x"),
    ],
)
def test_secrets_among_flags_are_masked(given, kept):
    assert manifest_flags(given) == kept
    assert manifest_flags(kept) == kept
