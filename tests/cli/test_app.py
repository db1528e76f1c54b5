from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

import neuron_store.errors
from neuron_store.cli.app import COMMANDS
from neuron_store.cli.exits import exit_status
from neuron_store.cli.manifest import manifest
from neuron_store.cli.output import printable, time_left
from tests.cli.conftest import KEY

ESCAPE = re.compile(r"\x1b")


def test_help_lists_every_command(command):
    result = command("--help")
    assert result.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +\w", result.stdout, re.MULTILINE), name


@pytest.mark.parametrize("name", [*COMMANDS, *(f"manifest {name}" for name in manifest.commands)])
def test_every_command_has_help_and_json(cli, name):
    assert "--json" in cli(*name.split(), "--help").stdout


def test_version(command):
    assert re.fullmatch(r"neuron-store \d+\.\d+\.\d+\S*\n", command("--version").stdout)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['neuron-store', '--help']\n"
        "from neuron_store.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(result.stderr.split())
    assert "neuron_store.cli.app" in loaded
    assert "neuron_store.cli.demo" not in loaded
    heavy = {"rich", "fsspec", "botocore", "cattrs", "filelock", "numpy", "neuron_store_backends"}
    assert not heavy & loaded
    assert "neuron_store.settings" not in loaded


@pytest.mark.parametrize("name", neuron_store.errors.__all__)
def test_only_what_the_caller_must_put_right_is_status_2(name):
    cls = getattr(neuron_store.errors, name)
    callers = {
        "ConfigError",
        "InvalidKey",
        "ManifestError",
        "MissingExtra",
        "ReadOnlyTier",
        "UnknownScheme",
        "Unsupported",
    }
    assert exit_status(cls.__new__(cls)) == (2 if name in callers else 1)


def test_an_error_is_one_json_document_too(cli):
    result = cli("show", "../x", "--json", status=2)
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert document["command"] == "show"
    assert document["error"]["type"] == "InvalidKey"
    assert document["error"]["message"] in result.stderr


def test_an_error_names_the_whole_command(cli, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for arguments in (["manifest", "show"], ["prefetch", "--manifest"]):
        document = json.loads(cli(*arguments, tmp_path / "bad.json", "--json", status=2).stdout)
        assert document["error"]["type"] == "ManifestError"
        assert document["command"] == " ".join(arguments).removesuffix(" --manifest")


def test_a_wrong_command_is_a_usage_error(command):
    result = command("lss")
    assert result.returncode == 2
    assert "lss" in result.stderr
    assert result.stdout == ""


def test_verbose_logs_to_stderr_and_not_to_stdout(command, put, places):
    (put(places.shared) / f"graph_{KEY}.vmfb").write_bytes(b"PROGRAM")
    result = command("--local", places.local, "--tier", places.shared, "-v", "fetch", KEY, "--json")
    assert json.loads(result.stdout)["artifacts"][0]["outcome"] != "fetched"
    assert "warning: artifact" in result.stderr


def test_piped_output_has_no_escape_codes_even_when_colour_is_forced(command, put, places):
    put(places.local)
    env = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm-256color"}
    for arguments in (["ls"], ["show", KEY], ["doctor"], ["config"], ["verify"]):
        result = command("--local", places.local, *arguments, env=env)
        assert result.returncode == 0
        assert result.stdout
        assert not ESCAPE.search(result.stdout + result.stderr)


def on_terminal(
    *arguments: object, program=("-m", "neuron_store.cli"), width=150
) -> tuple[int, str]:
    """Run the command with a terminal as its stdout and stderr; status and what it showed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width)},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            shown += data
        os.close(ours)
    return process.returncode, shown.decode()


def test_a_terminal_gets_a_table_with_units_and_colours(put, places):
    put(places.local, data=b"x" * 3000)
    status, shown = on_terminal("--local", places.local, "ls")
    assert status == 0
    assert "2.9 KiB" in shown
    assert ESCAPE.search(shown)
    assert "executable" in shown


def test_a_terminal_gets_a_table_of_nothing_too(places):
    status, _ = on_terminal("--local", places.local, "ls", width=80)
    assert status == 0


def test_a_narrow_terminal_leaves_keys_and_paths_in_one_piece(put, places):
    put(places.shared)
    options = ["--local", places.local, "--tier", places.shared]
    _, shown = on_terminal(*options, "ls", width=80)
    assert KEY in shown
    _, shown = on_terminal(*options, "fetch", KEY, width=80)
    assert KEY in shown
    assert str(places.local / KEY) in shown


def test_doctor_on_a_narrow_terminal_has_room_for_what_it_found(places):
    places.shared.mkdir(exist_ok=True)
    tiers = ["--local", places.local, "--tier", places.shared]
    status, shown = on_terminal(*tiers, "doctor", width=80)
    assert status == 0
    plain = ESCAPE.sub("", shown)
    for location in (places.local, places.shared):
        assert str(location) in plain
    assert "rename refuses a non-empty directory" in plain
    assert plain.count(" ms, the median") == 2


def test_json_on_a_terminal_is_still_json(put, places):
    put(places.local)
    status, shown = on_terminal("--local", places.local, "ls", "--json")
    assert status == 0
    assert json.loads(shown)["artifacts"][0]["key"] == KEY


HOSTILE = "\x1b]0;pwned\x07[red]not markup[/red]\x9b31m\r"


def test_text_of_a_record_reaches_no_terminal_as_control_or_markup(cli, put, places):
    put(places.local, compiler=HOSTILE, components={"x": HOSTILE})
    status, shown = on_terminal("--local", places.local, "show", KEY)
    assert status == 0
    assert "\x1b]0;" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown
    assert "[red]not markup[/red]" in shown
    piped = cli("show", KEY).stdout
    assert not ESCAPE.search(piped)
    assert "\r" not in piped


def test_printable_keeps_lines_and_shows_the_rest():
    assert printable("a\n\tb ü 漢") == "a\n\tb ü 漢"
    assert printable("\x1b[0m\u202e") == "\\x1b[0m\\u202e"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0:00:00"), (-3.0, "0:00:00"), (61.4, "0:01:01"), (7322, "2:02:02")],
)
def test_time_that_is_left(seconds, text):
    assert time_left(seconds) == f"about {text} left"


def test_nobody_reading_is_silent(put, places):
    put(places.local)
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-m", "neuron_store.cli", "--local", str(places.local), "ls"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(theirs)
    assert result.returncode == 141
    assert result.stderr == b""


def test_an_interrupt_is_quiet_and_130(tmp_path):
    pipe = tmp_path / "settings.toml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "neuron_store.cli", "config"],
        env={**os.environ, "NEURON_STORE_CONFIG": str(pipe)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Opens when the command has opened the other end, which then waits for what never comes.
    writer = os.open(pipe, os.O_WRONLY)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    os.close(writer)
    assert (process.returncode, stdout, stderr.strip()) == (130, "", "")
