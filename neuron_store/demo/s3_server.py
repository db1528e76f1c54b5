"""An S3 server in a process of its own: moto, on a free port of 127.0.0.1, objects in memory.

Answers one line on stdout when it is ready, and ends when stdin does. Any Python program may be
its client: nothing here is imported by the library.
"""

from __future__ import annotations

import json
import sys
import urllib.request

__all__ = ["BUCKET", "main"]

BUCKET = "neuron-store-demo"


def main() -> None:
    """Serve until stdin ends."""
    from moto.moto_server.threaded_moto_server import (  # noqa: PLC0415  (the extra; takes a second)
        ThreadedMotoServer,
    )

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # Not through the proxy that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://{host}:{port}/{BUCKET}", method="PUT")
    opener.open(request, timeout=30).close()
    sys.stdout.write(json.dumps({"ready": port}) + "\n")
    sys.stdout.flush()
    try:
        sys.stdin.read()
    except KeyboardInterrupt:
        pass
    server.stop()


if __name__ == "__main__":
    main()
