"""`sftp://host:port/path`: a tier of neuron_store on an SFTP server, through fsspec's sshfs."""

from neuron_store_sftp.store import SftpStore

__all__ = ["SftpStore"]
