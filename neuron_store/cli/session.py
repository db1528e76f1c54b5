"""What the options before the command say, and the store they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import click

from neuron_store.cli.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.abc import ArtifactStore
    from neuron_store.settings import Settings
    from neuron_store.tier_url import TierURL
    from neuron_store.tiered import TieredStore

__all__ = ["Session", "json_option", "pass_session"]

_F = TypeVar("_F", bound="Callable[..., Any]")


@attrs.define
class Session:
    """One run of the command."""

    local: str | None = None
    """`--local`: the local tier's root instead of the one in the settings."""
    tiers: tuple[str, ...] = ()
    """`--tier`: shared tiers instead of those in the settings."""
    out: Output = attrs.field(factory=Output)
    _store: TieredStore | None = None
    _settings: Settings | None = None

    def settings(self) -> Settings:
        """The settings, read once."""
        if self._settings is None:
            from neuron_store.settings import load_settings  # noqa: PLC0415  (`--help` needs none)

            self._settings = load_settings()
        return self._settings

    def local_root(self) -> Path:
        """The local tier's root."""
        if self.local is not None:
            return Path(self.local).expanduser().absolute()
        return self.settings().local_root

    def tier_urls(self) -> Sequence[TierURL]:
        """The shared tiers, from the command line or the settings."""
        from neuron_store.tier_url import parse_tier_url  # noqa: PLC0415  (`--help` needs none)

        if self.tiers:
            return [parse_tier_url(text) for text in self.tiers]
        return self.settings().tiers

    def store(self) -> TieredStore:
        """The store; closed when the command ends."""
        if self._store is None:
            from neuron_store.opening import open_store  # noqa: PLC0415  (`--help` needs none)

            self._store = open_store(self.tiers or None, local=self.local)
            click.get_current_context().call_on_close(self._store.close)
        return self._store

    def shared_tier(self, wanted: str | None) -> ArtifactStore:
        """One shared tier, opened without the others and the local one; closed with the command.

        Args:
            wanted: its name or location, or the URL of any other; None: the only one there is.

        Raises:
            ConfigError: none was said and there is not exactly one, or the URL is none.
        """
        from neuron_store.errors import ConfigError  # noqa: PLC0415  (`--help` needs none)
        from neuron_store.registry import open_tier  # noqa: PLC0415

        urls = self.tier_urls()
        if wanted is None:
            if len(urls) != 1:
                known = ", ".join(url.name or url.location for url in urls)
                which = f"there are {known}" if urls else "there is no shared tier"
                raise ConfigError(f"which tier? {which}; give --tier with a name or a URL")
            tier = open_tier(urls[0])
        else:
            named = [url for url in urls if wanted in {url.name, url.location}]
            tier = open_tier(named[0] if named else wanted)
        click.get_current_context().call_on_close(tier.close)
        return tier

    def chosen(self, names: Sequence[str]) -> Sequence[ArtifactStore]:
        """The tiers that a command's own `--tier` options name; all when there is none.

        Raises:
            ConfigError: no tier is called that.
        """
        from neuron_store.errors import ConfigError  # noqa: PLC0415  (`--help` needs none)

        store = self.store()
        if not names:
            return store.tiers
        found = []
        for wanted in names:
            matching = [t for t in store.tiers if wanted in {t.name, t.location}]
            if wanted == "local" and not matching:
                matching = [store.local]
            if not matching:
                known = ", ".join(["local", *(t.name for t in store.shared)])
                raise ConfigError(
                    f"no tier is called {wanted!r}; there are: {known}. To use another one, give "
                    "its URL before the command: neuron-store --tier URL ..."
                )
            found += matching
        return found


pass_session = click.make_pass_decorator(Session)


def _set_json(context: click.Context, _: click.Parameter, value: bool) -> None:
    session = context.find_object(Session)
    if session is None:
        return
    # Without the program's own name, which is whatever it was called by.
    session.out.command = context.command_path.partition(" ")[2]
    if value:
        session.out.json = True


def json_option(command: _F) -> _F:
    """Add `--json` to a command."""
    option = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_set_json,
        help="Print one JSON document to stdout.",
    )
    return option(command)
