"""An S3 server in a process of its own that answers each request some time later.

    python benchmarks/slow_bucket.py FOLDER PORT SECONDS

localbucket, its requests delayed in its own threads: a proxy before it would have to carry every
byte once more, on the same cores that the client is measured on. What was read once goes out by
`sendfile` the next time: a real bucket does not work on the client's machine, and localbucket's
Python takes more of it than the client does.
"""

from __future__ import annotations

import os
import sys
import time
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import localbucket

# Request line to the head of the answer, the object's file and its size.
_known: dict[bytes, tuple[bytes, str, int]] = {}


class Slow(localbucket.S3Handler):
    delay = 0.0
    # Else a small body waits for the acknowledgement of its head: 40 ms more, now and then.
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        buffered = self.rfile.peek()
        line = buffered[: buffered.find(b"\r\n") + 2]
        end = buffered.find(b"\r\n\r\n")
        known = _known.get(line)
        if known is None or end < 0 or b"\r\nrange:" in buffered[:end].lower():
            super().handle_one_request()
            return
        self.close_connection = False
        self.rfile.read(end + 4)
        time.sleep(self.delay)
        head, path, size = known
        self.wfile.write(head)
        with open(path, "rb", buffering=0) as file:
            at = 0
            while at < size:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, size - at)

    def parse_request(self) -> bool:
        good: bool = super().parse_request()
        if good:
            time.sleep(self.delay)
            if self.command not in {"GET", "HEAD"}:
                _known.clear()
        return good

    def _send_file(self, status: int, file: Any, *how: Any) -> None:
        super()._send_file(status, file, *how)
        _, length, headers, _ = how
        if self.command == "GET" and status == HTTPStatus.OK:
            told = {**headers, "Content-Length": length}
            lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            head = f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode()
            _known[self.raw_requestline] = (head, file.name, length)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    root, port, delay = sys.argv[1:]
    localbucket.S3Handler.data_root = Path(root)
    Slow.delay = float(delay)
    Server(("127.0.0.1", int(port)), Slow).serve_forever()


if __name__ == "__main__":
    main()
