"""The manifest, field for field, and how it is read and written.

Version "1" as vllm_neuron documents it. Reading is strict about what a field may hold and lenient
about fields that it does not know: those of a later minor version are kept, and written back.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from neuron_store._strict_json import load_written_json
from neuron_store.artifact import is_key
from neuron_store.errors import ManifestError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "MANIFEST_NAME",
    "MANIFEST_VERSION",
    "MAX_COUNT",
    "MAX_MANIFEST_BYTES",
    "Config",
    "Graph",
    "Manifest",
    "Topology",
    "dump_manifest",
    "load_manifest",
]

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = "1"
MAX_MANIFEST_BYTES = 256 << 20
"""A larger file is refused unread."""
MAX_COUNT = 1 << 63
"""Ranks, sizes and counts are below it."""
_VERSION = r"1(\.[0-9]{1,9})?"
_MAX_FAULTS = 8


def _says(text: str, **more: Any) -> dict[str, Any]:
    return {"description": text, **more}


def _extra() -> Any:
    return attrs.field(factory=dict, kw_only=True, metadata={"extra": True}, repr=False)


def _plain_key(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not is_key(value):
        raise ValueError(f"{attribute.name} {value[:80]!r} is not one safe path component")


def _counts(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if number is not None and not 0 <= number < MAX_COUNT:
            what = "is negative" if number < 0 else "is no count"
            raise ValueError(f"{attribute.name} {_digits(number)} {what}")


def _setting(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    # vLLM knows negative ones, which stand for "as many as fit".
    if value is not None and not -MAX_COUNT < value < MAX_COUNT:
        raise ValueError(f"{attribute.name} {_digits(value)} is out of range")


def _digits(number: int) -> str:
    # Python refuses to write out numbers of more than 4300 digits.
    return str(number) if abs(number) < 10**30 else f"of {number.bit_length()} bits"


def _number(description: str = "") -> Any:
    return attrs.field(
        default=None,
        validator=_setting,
        metadata=_says(description) if description else {},
    )


@attrs.frozen
class Topology:
    """How the ranks are arranged. None where the configuration does not say."""

    world_size: int | None = _number("Ranks of the engine.")
    tensor_parallel_size: int | None = _number()
    pipeline_parallel_size: int | None = _number()
    data_parallel_size: int | None = _number()
    attention_dp_size: int | None = _number("Data parallelism of the attention layers.")
    ep_degree: int | None = _number("Expert parallelism, resolved.")
    decode_context_parallel_size: int | None = _number()
    has_collectives: bool | None = attrs.field(
        default=None, metadata=_says("Whether the graphs communicate between ranks.")
    )
    extra: Mapping[str, Any] = _extra()


@attrs.frozen
class Config:
    """How the run was compiled and served."""

    model: str | None = attrs.field(default=None, metadata=_says("Model path or name."))
    target: str | None = attrs.field(default=None, metadata=_says("Compiler target, such as trn2."))
    dtype: str | None = attrs.field(default=None, metadata=_says("Such as torch.bfloat16."))
    max_num_seqs: int | None = _number("Maximum of concurrent sequences.")
    max_model_len: int | None = _number("Maximum sequence length, in tokens.")
    topology: Topology = attrs.field(factory=Topology)
    neuron_config: Mapping[str, Any] = attrs.field(
        factory=dict, metadata=_says("Full resolved Neuron configuration, as JSON.")
    )
    vllm_config: Mapping[str, Any] = attrs.field(
        factory=dict, metadata=_says("Full resolved vLLM configuration, as JSON.")
    )
    extra: Mapping[str, Any] = _extra()


@attrs.frozen
class Graph:
    """One compiled graph. What the store could not tell is None."""

    graph_hash: str = attrs.field(
        validator=_plain_key,
        metadata=_says("The graph's key: the name of its directory in the compile cache."),
    )
    hlo_path: str | None = attrs.field(
        default=None, metadata=_says("The HLO module, relative to the cache's root.")
    )
    neff_path: str | None = attrs.field(
        default=None, metadata=_says("The executable, relative to the cache's root.")
    )
    neff_size: int | None = attrs.field(
        default=None, validator=_counts, metadata=_says("Bytes of the executable.")
    )
    created_timestamp: str | None = attrs.field(
        default=None,
        metadata=_says(
            "When it was compiled, as the record says, else the executable's mtime: ISO 8601, UTC."
        ),
    )
    input_shapes: tuple[str, ...] = attrs.field(
        default=(), metadata=_says('In order; "4," and "4, 2048", "" for a scalar.')
    )
    output_shapes: tuple[str, ...] | None = attrs.field(
        default=None, metadata=_says('In order; "4" and "4, 2048", "" for a scalar.')
    )
    compiler_flags: str = attrs.field(
        default="", metadata=_says("In their order, without machine-specific paths.")
    )
    ranks: tuple[int, ...] = attrs.field(
        default=(), validator=_counts, metadata=_says("Global ranks that traced it.")
    )
    input_snapshot_paths: tuple[str, ...] = attrs.field(default=(), metadata=_says("Reserved."))
    output_snapshot_paths: tuple[str, ...] = attrs.field(default=(), metadata=_says("Reserved."))
    extra: Mapping[str, Any] = _extra()


@attrs.frozen
class Manifest:
    """All that one engine compiled, and from what."""

    manifest_version: str = attrs.field(
        default=MANIFEST_VERSION,
        metadata=_says("1, or a later minor such as 1.1.", pattern=f"^{_VERSION}$"),
    )
    config: Config = attrs.field(factory=Config)
    graphs: tuple[Graph, ...] = ()
    environment: Mapping[str, str] = attrs.field(
        factory=dict, metadata=_says("Installed packages and Python, with their versions.")
    )
    extra: Mapping[str, Any] = _extra()

    def graph(self, key: str) -> Graph | None:
        """The graph of that hash, if the manifest lists it."""
        return next((graph for graph in self.graphs if graph.graph_hash == key), None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that traced any of the graphs, ascending."""
        return tuple(sorted({rank for graph in self.graphs for rank in graph.ranks}))


def _exactly(wanted: type, name: str) -> Callable[[Any, Any], Any]:
    # cattrs would turn 1.9 into 1 and None into "None".
    def hook(value: Any, _: Any) -> Any:
        if type(value) is not wanted:
            raise TypeError(f"{name} expected, not {json.dumps(value, default=str)[:60]}")
        return value

    return hook


def _list_of(wanted: type, name: str) -> Callable[[Any, Any], Any]:
    strict = _exactly(wanted, name)

    def hook(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(f"a list expected, not {type(value).__name__}")
        return tuple([strict(entry, None) for entry in value])

    return hook


def _ranks(value: Any, kind: Any) -> tuple[int, ...]:
    """A set of them, ascending, however they were written."""
    strict: tuple[int, ...] = _list_of(int, "an integer")(value, kind)
    return tuple(sorted(set(strict)))


def _object(value: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"an object expected, not {type(value).__name__}")
    if kind == Mapping[str, str]:
        for key, entry in value.items():
            if not isinstance(entry, str):
                raise TypeError(f"a string expected for {key[:40]!r}")
    return value


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=False)
    converter.register_structure_hook(str, _exactly(str, "a string"))
    converter.register_structure_hook(int, _exactly(int, "an integer"))
    converter.register_structure_hook(bool, _exactly(bool, "true or false"))
    for kind, hook in (
        (tuple[str, ...], _list_of(str, "a string")),
        (tuple[int, ...], _ranks),
        (Mapping[str, str], _object),
        (Mapping[str, Any], _object),
    ):
        converter.register_structure_hook_func(functools.partial(operator.eq, kind), hook)
    for model in (Topology, Config, Graph, Manifest):
        converter.register_structure_hook(model, _keeping_unknown(converter, model))
    return converter


def _keeping_unknown(converter: cattrs.Converter, model: type) -> Callable[[Any, Any], Any]:
    attrs.resolve_types(model)
    known = {field.name for field in attrs.fields(model)} - {"extra"}
    # cattrs takes whatever can be iterated for a list of objects.
    lists = ["graphs"] if model is Manifest else []
    # What a later minor may bring as `extra` would collide with the field that keeps the rest.
    structure: Callable[[Any, Any], Any] = make_dict_structure_fn(
        model, converter, extra=override(omit=True)
    )

    def hook(value: Any, kind: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"an object expected, not {type(value).__name__}")
        for name in lists:
            if not isinstance(value.get(name, []), list):
                raise TypeError(f"{name}: a list expected, not {type(value[name]).__name__}")
        made = structure(value, kind)
        if value.keys() <= known:
            return made
        return attrs.evolve(made, extra={k: v for k, v in value.items() if k not in known})

    return hook


_CONVERTER = _converter()


def load_manifest(data: bytes | str, *, source: str | None = None) -> Manifest:
    """Parse a manifest.

    Args:
        data: the file's content.
        source: named in errors.

    Raises:
        ManifestError: not JSON, another version, or fields that do not hold what they should;
            each fault is named with its place.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"{len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read", source=source
        )
    try:
        raw = load_written_json(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not JSON ({error})", source=source) from None
    if not isinstance(raw, dict) or "manifest_version" not in raw:
        raise ManifestError(
            "no compile-artifact manifest: manifest_version is missing", source=source
        )
    version = raw["manifest_version"]
    if not isinstance(version, str):
        raise ManifestError(
            f"manifest_version {json.dumps(version)[:40]} is no string; write "
            f'"{MANIFEST_VERSION}" in quotes',
            source=source,
        )
    if re.fullmatch(_VERSION, version) is None:
        raise ManifestError(
            f"manifest_version {json.dumps(version)[:40]} is not known; this release reads "
            f'"{MANIFEST_VERSION}": upgrade neuron-store',
            source=source,
        )
    _require_parts(raw, source)
    try:
        manifest = _CONVERTER.structure(raw, Manifest)
    except Exception as error:
        faults = cattrs.transform_error(error, path="manifest", format_exception=_told)
        shown = "; ".join(faults[:_MAX_FAULTS])
        more = f"; and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise ManifestError(shown + more, source=source) from error
    seen: set[str] = set()
    for graph in manifest.graphs:
        if graph.graph_hash in seen:
            raise ManifestError(f"graph {graph.graph_hash} is listed twice", source=source)
        seen.add(graph.graph_hash)
    return manifest


def _require_parts(raw: dict[str, Any], source: str | None) -> None:
    if "graphs" not in raw:
        raise ManifestError("no compile-artifact manifest: graphs is missing", source=source)
    for name in ("config", "environment"):
        if name not in raw:
            where = "" if source is None else f"{source}: "
            logger.warning("%s%s is missing; what depends on it stays untold", where, name)


def _told(error: BaseException, _: type | None) -> str:
    if isinstance(error, KeyError):
        return f"required field {error} is missing"
    return str(error)


def to_json(value: Any) -> Any:
    """A manifest's object as JSON values, in the order of its fields, unknown ones last."""
    if type(value) is tuple:
        return [to_json(item) for item in value]
    if not attrs.has(type(value)):
        return value
    plain = {
        field.name: to_json(getattr(value, field.name))
        for field in attrs.fields(type(value))
        if field.name != "extra"
    }
    plain.update(value.extra)
    return plain


def _graph_json(graph: Graph) -> dict[str, Any]:
    # As `to_json`, without its recursion: ten thousand of them are written at once.
    return {**{name: getattr(graph, name) for name in _GRAPH_FIELDS}, **graph.extra}


_GRAPH_FIELDS = tuple(f.name for f in attrs.fields(Graph) if f.name != "extra")


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON: indented, and each graph on a line of its own."""
    # Indenting takes the slow encoder; ten thousand graphs need the fast one.
    graphs = ",\n    ".join(
        json.dumps(_graph_json(graph), allow_nan=False) for graph in manifest.graphs
    )
    parts = []
    for name, value in to_json(attrs.evolve(manifest, graphs=())).items():
        if name == "graphs":
            text = f"[\n    {graphs}\n  ]" if graphs else "[]"
        else:
            text = json.dumps(value, indent=2, allow_nan=False).replace("\n", "\n  ")
        parts.append(f"{json.dumps(name)}: {text}")
    return ("{\n  " + ",\n  ".join(parts) + "\n}\n").encode()
