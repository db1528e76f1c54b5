"""Child processes that answer requests, each with an environment of its own.

None outlives us: they end when their stdin does, which the kernel closes even when we are killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from neuron_store.errors import NeuronStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

__all__ = ["Child", "DemoFailed", "clean_environment", "gather"]

# The user's own settings, and what would lead a client elsewhere.
_PREFIXES = ("NEURON_", "VLLM_", "AWS_", "BOTO", "S3_", "FSSPEC_", "MOTO_", "IREE_")
_NAMES = frozenset(
    {
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "rank",
        "local_rank",
        "world_size",
        "requests_ca_bundle",
    }
)
_GRACE = 3.0


class DemoFailed(NeuronStoreError, RuntimeError):
    """A process of the demo died, failed or fell silent."""


def clean_environment(scratch: Path) -> dict[str, str]:
    """Our environment without anything that could reach the user's caches, accounts or servers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(_PREFIXES) and name.lower() not in _NAMES
    }
    return {
        **kept,
        "NO_PROXY": "127.0.0.1",
        "FSSPEC_CONFIG_DIR": str(scratch / "no-fsspec-config"),
        # Made up, for a server that takes any; no file or metadata service is asked.
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Child:
    """One process that runs a module and answers lines of JSON."""

    def __init__(self, name: str, module: str, env: Mapping[str, str], log: Path) -> None:
        """Args: name, for messages; module, to run; env, all of it; log, where stderr goes."""
        self.name = name
        self.log = log
        self._buffer = b""
        with log.open("wb") as sink:
            self._process = subprocess.Popen(  # noqa: S603  (our own module)
                # -P: a file in the working directory must not shadow a module.
                [sys.executable, "-P", "-m", module],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                # Ctrl-C is ours to handle; and the group can be ended as a whole.
                start_new_session=True,
            )

    @property
    def stdout(self) -> int:
        """The descriptor to wait on."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, request: Mapping[str, Any]) -> None:
        """Ask for something; `gather` gets the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failed("ended before it was asked") from None

    def receive(self) -> dict[str, Any] | None:
        """The answer when it has come; call it when `stdout` can be read."""
        data = os.read(self.stdout, 1 << 16)
        if not data:
            raise self.failed(f"ended with status {self._process.wait(_GRACE)}")
        self._buffer += data
        if not self._buffer.endswith(b"\n"):
            return None
        answer, self._buffer = json.loads(self._buffer), b""
        assert isinstance(answer, dict)
        if "error" in answer:
            raise self.failed(str(answer["error"]))
        return answer

    def failed(self, what: str) -> DemoFailed:
        """The error that says what went wrong, with the last lines of the log."""
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()[-15:]
        except OSError:
            lines = []
        return DemoFailed("\n".join([f"{self.name} {what}", *lines]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(patience=0.0 if kind is not None else _GRACE)

    def stop(self, patience: float = _GRACE) -> None:
        """End it and what it started: by the end of its stdin, then by signals. Idempotent."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        for wait, number in (
            (patience, signal.SIGTERM),
            (_GRACE, signal.SIGKILL),
            (_GRACE, signal.SIGKILL),
        ):
            try:
                process.wait(wait)
                break
            except subprocess.TimeoutExpired:
                # Not reaped, so the number is still its own.
                os.killpg(process.pid, number)
        process.stdout.close()


def gather(children: Sequence[Child], seconds: float) -> list[dict[str, Any]]:
    """One answer from each child, in their order.

    Raises:
        DemoFailed: one failed or ended, or has not answered after `seconds`.
    """
    answers: dict[Child, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.stdout, selectors.EVENT_READ, child)
        while len(answers) < len(children):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = next(child for child in children if child not in answers)
                raise silent.failed(f"has not answered in {seconds:g} s")
            for key, _ in ready:
                child = key.data
                answer = child.receive()
                if answer is not None:
                    answers[child] = answer
                    selector.unregister(child.stdout)
    return [answers[child] for child in children]
