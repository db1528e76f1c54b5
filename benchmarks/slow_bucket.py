"""An S3 server in a process of its own that answers each request some time later.

    python benchmarks/slow_bucket.py FOLDER PORT SECONDS

localbucket, its requests delayed in its own threads: a proxy before it would have to carry every
byte once more, on the same cores that the client is measured on.
"""

from __future__ import annotations

import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import localbucket


class Slow(localbucket.S3Handler):
    delay = 0.0
    # Else a small body waits for the acknowledgement of its head: 40 ms more, now and then.
    disable_nagle_algorithm = True

    def parse_request(self) -> bool:
        good: bool = super().parse_request()
        if good:
            time.sleep(self.delay)
        return good

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
