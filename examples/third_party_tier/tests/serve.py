"""An SFTP server on 127.0.0.1: `serve.py FOLDER`. Writes keys and `ready` (its port) to FOLDER.

Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncssh


async def serve(folder: Path) -> None:
    for name in ("host", "client"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[str(folder / "host")],
        authorized_client_keys=str(folder / "client.pub"),
        sftp_factory=True,
    )
    port = server.get_port()
    known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    (folder / "ready.part").write_text(str(port))
    (folder / "ready.part").rename(folder / "ready")
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
