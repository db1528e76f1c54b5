import shlex

import pytest

from neuron_store.manifest.flags import canonical_flags, strip_machine_paths

COMMAND = (
    "neuronx-cc compile /c/k/graph.hlo --framework XLA --target trn2 --output /c/k/graph_k.neff "
    "--logfile /c/k/log-neuron-cc.txt --auto-cast=none --verbose=35 -O2"
)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            COMMAND,
            "--framework XLA --target trn2 --auto-cast=none --verbose=35 -O2",
        ),
        ("--output=/a/b.neff --logfile=log-neuron-cc.txt -O1", "-O1"),
        ("--dump /tmp/dump --a --workdir=relative/dir --b", "--a --b"),
        (
            "--cache_dir=s3://bucket/x --no_cache --retry_failed_compilation --log_level 3 --k",
            "--k",
        ),
        ("--enable-x graph.hlo --y", "--enable-x --y"),
        ("--config=/home/u/cfg.json --y=~/x --z='$HOME/q' --keep=a/b", "--keep=a/b"),
        ("--seed-file /etc/seed --y", "--y"),
        ("", ""),
    ],
)
def test_what_belongs_to_one_machine_is_left_out_and_the_order_kept(given, kept):
    assert strip_machine_paths(given) == kept


def test_values_with_blanks_stay_quoted_and_are_never_split():
    given = [
        "--internal-backend-options=--enable-verifier=false --enable-nested-dynamic-loop",
        "--tensorizer-options=--x='a b' --y",
    ]
    assert shlex.split(strip_machine_paths(given)) == given
    assert strip_machine_paths(shlex.join(given)) == strip_machine_paths(given)


def test_a_path_inside_an_options_own_options_is_left_out_and_the_rest_kept():
    given = ["--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10 --dump=/tmp/x"]
    assert (
        strip_machine_paths(given)
        == "--internal-hlo2tensorizer-options=--modular-flow-mac-threshold=10"
    )


def test_repeats_are_all_told():
    assert strip_machine_paths("-O1 -O2 --a=1 --a=2") == "-O1 -O2 --a=1 --a=2"


def test_quotes_that_do_not_close_lose_nothing():
    assert "unclosed" in strip_machine_paths("--a 'unclosed")


def test_the_canonical_form_ignores_order_and_spelling_and_takes_the_last():
    assert canonical_flags("--a=1 --b 2 -O1") == canonical_flags("-O1 --b=2 --a 1")
    assert canonical_flags("--a=1 --a=2") == {"--a": "2"}
    assert canonical_flags("--lone --x=") == {"--lone": "True", "--x": ""}
