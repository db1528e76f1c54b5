"""`s3://bucket/prefix`: Amazon S3 and servers that speak its language, through botocore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_store.errors import ConfigError
from neuron_store.tier_url import parse_bool
from neuron_store_backends._options import TIMES, Times, check_root, compression, require_module
from neuron_store_backends._options import times as read_times
from neuron_store_backends.conditional import ConditionalStore

if TYPE_CHECKING:
    from neuron_store.tier_url import TierURL

__all__ = ["S3Store"]

_OPTIONS = (
    "addressing_style",
    "anon",
    "compress",
    "endpoint_url",
    "path_style",
    "profile",
    "region",
    *TIMES,
)


class S3Store(ConditionalStore):
    """Artifacts in a bucket.

    Args:
        address: `bucket/prefix`.
        endpoint_url: for servers other than Amazon's.
        region: of the bucket; else the AWS chain's.
        profile: of `~/.aws/config`; else the AWS chain's.
        anon: send unsigned requests.
        addressing_style: `path`, `virtual` or `auto` (which is `path` with an endpoint_url).
        times: deadlines.
        name: short name for tables.
        read_only: leave no word of damage behind.
        compress: `zstd` stores each file compressed that shrinks by it.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anon: bool = False,
        addressing_style: str = "auto",
        times: Times | None = None,
        name: str | None = None,
        read_only: bool = False,
        compress: str | None = None,
    ) -> None:
        location = f"s3://{address.strip('/')}"
        require_module("botocore", "s3", location)
        root = check_root(address, location)
        times = times or Times()
        if addressing_style not in {"auto", "path", "virtual"}:
            raise ConfigError(
                f"tier {location}: addressing_style={addressing_style!r}; use path, virtual or auto"
            )
        if addressing_style == "auto" and endpoint_url:
            addressing_style = "path"
        from neuron_store_backends._s3_objects import S3Objects  # noqa: PLC0415  (the extra)

        objects = S3Objects(
            location,
            root,
            times,
            endpoint_url=endpoint_url,
            region=region,
            profile=profile,
            anon=anon,
            addressing_style=addressing_style,
        )
        objects.identity = f"{location} {endpoint_url} {region} {profile}"
        super().__init__(objects, name=name, read_only=read_only, compress=compress)

    @classmethod
    def from_url(cls, url: TierURL) -> S3Store:
        """Open the tier of a URL.

        Raises:
            ConfigError: an option is unknown or cannot be used.
            MissingExtra: botocore is not installed.
        """
        options = url.checked_options(_OPTIONS)
        where = f"tier {url.location}"
        style = options.get("addressing_style", "auto")
        if "path_style" in options:
            path = parse_bool(options["path_style"], what=f"{where}: path_style")
            style = "path" if path else "virtual"
        endpoint = options.get("endpoint_url")
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{where}: endpoint_url={endpoint!r} is not an http(s) URL")
        return cls(
            url.address,
            endpoint_url=endpoint,
            region=options.get("region"),
            profile=options.get("profile"),
            anon=parse_bool(options.get("anon", "0"), what=f"{where}: anon"),
            addressing_style=style,
            name=url.name,
            read_only=url.read_only,
            compress=compression(options, where),
            times=read_times(options, where),
        )
