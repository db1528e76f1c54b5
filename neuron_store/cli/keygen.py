"""`neuron-store keygen`: a key pair to sign promotions with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from neuron_store.cli.session import json_option, pass_session

if TYPE_CHECKING:
    from neuron_store.cli.session import Session

__all__ = ["keygen"]


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "--public", is_flag=True, help="Print the public key of the private key FILE; write nothing."
)
@json_option
@pass_session
def keygen(session: Session, file: str, public: bool) -> None:
    """Make a key pair: the private key in the new FILE (mode 0600), the public one in FILE.pub.

    Prints the public key, which goes into NEURON_STORE_TRUSTED_KEYS on the nodes that fetch.
    Nothing is ever overwritten.
    """
    from neuron_store.signing import Signer, create_key  # noqa: PLC0415  (`--help` needs none)

    key = Signer.load(file, what="FILE").public if public else create_key(file)
    if session.out.json:
        session.out.document(
            ok=True,
            private=file,
            public=None if public else f"{file}.pub",
            key=str(key),
            key_id=key.id,
        )
        return
    session.out.write(f"{key}\n")
    if not public:
        session.out.say(
            f"private key in {file} (keep it where only the promoter reads it), "
            f"public key {key.id} in {file}.pub"
        )
