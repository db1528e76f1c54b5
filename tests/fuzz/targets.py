"""The targets: what is read that somebody else may have written.

Each ends in a value or in one of its `allowed` errors, for every input.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
from pathlib import Path

import attrs
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import strategies as st

from neuron_store.abc import Publication
from neuron_store.artifact import (
    RECORD_NAME,
    Artifact,
    ArtifactFile,
    check_file_name,
    dump_record,
    is_key,
    load_record,
)
from neuron_store.batch import read_jobs
from neuron_store.byte_sizes import human_bytes, parse_bytes
from neuron_store.compiler_flags import (
    NEURONX_CC,
    canonical_flags,
    last_value,
    manifest_flags,
    parse_flags,
    settled_flags,
)
from neuron_store.compilers import _hlo
from neuron_store.durations import human_duration, parse_duration
from neuron_store.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    CompileError,
    ConfigError,
    HloError,
    InvalidArtifact,
    InvalidKey,
    InvalidRecord,
    LeaseHeld,
    ManifestError,
    TierError,
    Unsupported,
)
from neuron_store.failures import note_failure, read_failures
from neuron_store.key import digest
from neuron_store.locks import read_holder_note
from neuron_store.manifest.diff import diff_manifests
from neuron_store.manifest.hlo import read_program_shape
from neuron_store.manifest.ledger import read_ledger
from neuron_store.manifest.merge import merge_engines
from neuron_store.manifest.reader import Engine
from neuron_store.manifest.report import render_report
from neuron_store.manifest.schema import dump_manifest, load_manifest
from neuron_store.neuron_layout import completion_mark, neff_length
from neuron_store.registry import open_tier
from neuron_store.settings import load_settings
from neuron_store.tier_url import parse_tier_url
from neuron_store.variables import VARIABLES
from neuron_store_backends._lease_record import (
    LeaseRecord,
    dump_lease,
    lease_name,
    load_lease,
    read_name,
)
from neuron_store_backends._lease_renaming import LEASES, DirectoryLeases, _look
from neuron_store_backends._parcels import bundled
from neuron_store_backends.local import LocalStore
from neuron_store_backends.memory import MemoryStore
from neuron_store_backends.posix import PosixStore
from tests.fakes import neff
from tests.fuzz.guarding import SECRET, Broken
from tests.fuzz.mutating import VALUES
from tests.fuzz.target import HERE, Target, must
from tests.fuzz.trusting import TRUST_TARGETS
from tests.manifest import samples

__all__ = ["TARGETS"]

EXAMPLES = HERE.parents[1] / "examples" / "graphs"
KEY = "0123456789abcdef0123456789abcdef"
WRITE_ID = "f" * 32
CREATED = "2026-08-06T20:37:11.818072+00:00"


# Nothing nested: hypothesis takes its time over that, and the mutants have it.
_json = (
    st.sampled_from([*VALUES, KEY, WRITE_ID, CREATED, "graph.hlo", "trn2"])
    | st.integers(-(10**30), 10**30)
    | st.text(max_size=12)
)


def _object(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[bytes]:
    """A JSON object with each of the fields or without, each right or any value."""
    either = {name: field | _json for name, field in fields.items()}
    return st.fixed_dictionaries({}, optional=either).map(lambda v: json.dumps(v).encode())


def _text(alphabet: str = "") -> st.SearchStrategy[bytes]:
    some = st.text(max_size=200)
    if alphabet:
        some |= st.text(alphabet, max_size=60)
    return some.map(lambda t: t.encode("utf-8", "surrogatepass"))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# -- records ---------------------------------------------------------------------------

_FILES = {
    "graph.hlo": b"\x0a\x04test",
    f"graph_{KEY}.neff": neff(b"payload"),
    ".artifact_metadata_v0.json": json.dumps({"version": 0, "cache_key": KEY}).encode(),
    ".compilation_complete": completion_mark(1031, now=1786048631.5),
}


def _artifact(**facts: object) -> Artifact:
    files = tuple(ArtifactFile(n, len(d), digest(d)) for n, d in sorted(_FILES.items()))
    given = {"executable": f"graph_{KEY}.neff", "compiler": "neuronx-cc", **facts}
    return Artifact(KEY, files, CREATED, write_id=WRITE_ID, **given)  # type: ignore[arg-type]


@functools.cache
def _records() -> list[bytes]:
    full = _artifact(
        compiler_version="2.31.1",
        components={"flags": "-O2", "target": "trn2", "inputs": [[4, 2048]], "extra": {"a": None}},
        host={"machine": "x86_64", "python": "3.11.7"},
    )
    inline = {n: d for n, d in _FILES.items() if len(d) < 100}
    nested = Artifact(KEY, (ArtifactFile("a/b.bin", 1, "0" * 64),), CREATED, write_id=WRITE_ID)
    small = [ArtifactFile(f"k{n}", 9000 + n, f"{n:064x}") for n in range(6)]
    together = Artifact(KEY, tuple(bundled(small)), CREATED, write_id=WRITE_ID)
    found = [_artifact(), nested, together]
    return [dump_record(full, inline), *map(dump_record, found)]


_RECORD = _object(
    neuron_store_record=st.just(1),
    key=st.just(KEY),
    write_id=st.just(WRITE_ID),
    created=st.just(CREATED),
    files=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from([*_FILES, "../x", "/x", "a/b"]),
                "size": st.integers(-1, 2000),
                "sha256": st.sampled_from(["0" * 64, None]),
            }
        ),
        max_size=3,
    ),
    components=st.dictionaries(st.text(max_size=4), _json),
    host=st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
    inline=st.dictionaries(st.sampled_from([*_FILES]), st.text("ABab01+/=", max_size=8)),
)


def _record(data: bytes, root: Path) -> object:
    artifact, inline = load_record(data, key=KEY, source="the tier")
    for file in artifact.files:
        inside = os.path.normpath(root / file.name)
        must(inside.startswith(f"{root}/"), f"file name {file.name!r} leaves the artifact")
        check_file_name(file.name)
    try:
        again = load_record(dump_record(artifact, inline), key=KEY, source="the tier")
    except InvalidRecord as error:
        raise Broken(f"a record that does not read back: {error}") from error
    must(again == (artifact, inline), "a record that does not read back equal")
    human_bytes(artifact.size)
    return len(artifact.files), len(inline), artifact.executable is None


def _record_in_tier(data: bytes, root: Path) -> object:
    """Of a directory's tier: read, fetched, checked, and made good by the next publish."""
    shutil.rmtree(root, ignore_errors=True)
    entry, source = root / "tier" / KEY, root / "source"
    for folder in (entry, source):
        folder.mkdir(parents=True)
        for name, content in _FILES.items():
            (folder / name).write_bytes(content)
    (entry / RECORD_NAME).write_bytes(data)
    tier = PosixStore(root / "tier")
    told = []
    (root / "out").mkdir()
    for use in (
        tier.find,
        tier.verify,
        tier.path_of,
        lambda key: tier.fetch(key, root / "out"),
        lambda key: tier.open_file(key, "graph.hlo").close(),
    ):
        try:
            told.append(use(KEY) is not None)
        except (ArtifactCorrupt, ArtifactNotFound, TierError) as error:
            told.append(type(error).__name__)
    must(set(tier.keys()) <= {KEY}, "a key that nobody published")
    try:
        answer = tier.publish(_artifact(), source)
    except TierError as error:
        # Of a newer release: not judged, not replaced.
        must("upgrade" in str(error), f"a publish failed: {error}")
        raise
    if answer is not Publication.CONFLICT:
        tier.verify(KEY)
    return (*told, answer)


_store = MemoryStore("fuzz")


def _objects() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def _record_in_objects(data: bytes, root: Path) -> object:
    """Of an object tier, where small files travel inside the record."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "out").mkdir(parents=True)
    _objects()
    objects = _store.objects
    objects.create(f"{objects.root}/index/{KEY}.json", data)
    told = []
    for use in (
        _store.find,
        _store.verify,
        lambda key: _store.fetch(key, root / "out"),
        lambda key: _store.open_file(key, "graph.hlo").close(),
        _store.delete,
    ):
        try:
            told.append(use(KEY) is not None)
        except (ArtifactCorrupt, ArtifactNotFound, TierError) as error:
            told.append(type(error).__name__)
    return tuple(told)


# -- manifests and ledgers -------------------------------------------------------------


@functools.cache
def _manifests() -> list[bytes]:
    small = samples.manifest(graphs=2, world=2, inputs=3)
    whole = samples.manifest(graphs=1, vanished=(0,))
    later = attrs.evolve(small, manifest_version="1.1", extra={"later": {"a": [1, None]}})
    merged = merge_engines([Engine("a", Path("a"), small), Engine("b", Path("b"), whole)])
    return [dump_manifest(each) for each in (small, whole, later, merged)]


def _manifest(data: bytes, _root: Path) -> object:
    manifest = load_manifest(data, source="manifest.json")
    written = dump_manifest(manifest)
    try:
        again = load_manifest(written)
    except ManifestError as error:
        raise Broken(f"a manifest that does not read back: {error}") from error
    must(dump_manifest(again) == written, "a manifest that does not read back equal")
    engines = [Engine(name, Path(name), manifest) for name in ("dev0_7", "dev8_15")]
    merged = merge_engines(engines)
    diff_manifests(manifest, merged)
    must("</html>" in render_report(engines), "half a report")
    load_manifest(dump_manifest(merged))
    return len(manifest.graphs), manifest.manifest_version, bool(manifest.extra)


_LEDGER = (
    b'{"key": "%s", "rank": 3, "input_shapes": ["4,", "4, 2048", ""], '
    b'"compiler_flags": "--target trn2 -O2"}\n' % KEY.encode()
)


def _ledger(data: bytes, root: Path) -> object:
    root.mkdir(exist_ok=True)
    (root / "4711.jsonl").write_bytes(data)
    lines = list(read_ledger(root))
    for line in lines:
        manifest_flags(line.compiler_flags)
    return len(lines)


# -- settings and addresses ------------------------------------------------------------

_CREDENTIAL = re.compile(
    rf"""://[^/\s"'?\#@=&]*{SECRET}[^/\s"'?\#@=&]*@
    | \?(?:[^\s?]*&)? [a-z_]* (?:secret|password|token) [a-z_]* = {SECRET}
    | (?:^|[{{,]) \s* [a-z_]* (?:secret|password|token) [a-z_]* \s* = \s* "{SECRET}""",
    re.VERBOSE | re.MULTILINE,
)


_CONTAINER = re.compile(rb"(?i)\A(\s*abfss?://)[^/:?#@\s]*@")


def _has_credential(data: bytes) -> bool:
    """Whether a URL's user information, or an option called as secrets are, has the secret.

    One that stands elsewhere too is told, and rightly.
    """
    text = _decoded(data)
    return SECRET in text and SECRET not in _CREDENTIAL.sub("", text)


def _url_has_credential(data: bytes) -> bool:
    # A bare path is a name, whatever it looks like.
    if data.strip().startswith((b"/", b"~")):
        return False
    # abfs://container@account: without a colon it is a name, too.
    return _has_credential(_CONTAINER.sub(rb"\1", data))


_URLS = [
    "/mnt/fsx/cache",
    "/mnt/fsx/cache?read_only=1&name=fsx",
    "posix:///mnt/fsx/with%20space?read_only=yes",
    "s3://bucket/prefix?endpoint_url=http://127.0.0.1:9000&region=us-east-1&path_style=1",
    f"s3://bucket/prefix?endpoint_url=http://user:{SECRET}@127.0.0.1:9000",
    f"s3://AKIA:{SECRET}@bucket/prefix",
    f"s3://bucket/prefix?aws_secret_access_key={SECRET}&anon=0",
    f"az://container/prefix?account_name=name&sas_token={SECRET}",
    "abfs://container@account/prefix?account_name=name&timeout=3",
    "gs://bucket/prefix?project=p&endpoint_url=http://127.0.0.1:4443&anon=true",
    "memory://fuzz/a?name=mine",
    f"sftp://user:{SECRET}@host/path",
]
_URL_TOKENS = (
    b"://",
    b"?",
    b"&",
    b"#",
    b"@",
    b":",
    b"%",
    b"[",
    b"]",
    b";",
    b"//",
    b"=",
    b" ",
    b"read_only=",
    b"name=",
    b"s3://",
    b"az://",
    b"posix://",
    b"local://",
    b"password=" + SECRET.encode(),
    b"u:" + SECRET.encode() + b"@",
)


def _tier_url(data: bytes, root: Path) -> object:
    url = parse_tier_url(_decoded(data))
    told = [url.location, repr(url), str(url.checked_options(url.options))]
    try:
        with open_tier(url) as tier:
            told += [tier.location, tier.name, repr(tier)]
            if url.scheme in {"posix", "local", "memory"}:
                try:
                    tier.find(KEY)
                except (TierError, ArtifactCorrupt) as error:
                    told.append(str(error))
    finally:
        secret = _url_has_credential(data)
        must(not (secret and SECRET in "".join(told)), f"the secret is told: {told}")
    return url.scheme, url.read_only, len(url.options)


_ENVIRONMENTS = [
    {"VLLM_CACHE_ROOT": "/cache", "NEURON_LIBTORCH_REMOTE_CACHE": "s3://bucket/prefix"},
    {name: "1" for name, variable in VARIABLES.items() if not isinstance(variable.default, tuple)},
    {
        "NEURON_STORE_TIERS": f"/mnt/a?read_only=1 s3://b/c?secret_access_key={SECRET}",
        "NEURON_STORE_PROMOTE": "auto",
        "NEURON_STORE_LEASE_TTL": "30",
        "NEURON_STORE_FLEET_LEASE": "true",
    },
    {"NEURON_STORE_TIERS": f"s3://u:{SECRET}@b/c", "NEURON_LIBTORCH_COMPILATION_TIMEOUT": "1e3"},
    {"NEURON_STORE_CONFIG": "/dev/null", "HOME": "/root", "USER": "me", "NEURON_STORE_OTHER": "x"},
    {"NEURON_STORE_CONFIG": "/dev/zero"},
]


def _environment_has_credential(data: bytes) -> bool:
    # The settings file's name is no URL.
    return b"NEURON_STORE_CONFIG=" not in data and _has_credential(data)


def _settings(data: bytes, root: Path) -> object:
    """Lines of NAME=value, as `environ` has them: no NUL in it."""
    root.mkdir(exist_ok=True)
    lines = [line.partition("=") for line in _decoded(data.replace(b"\0", b"")).split("\n")]
    environ = {"HOME": str(root), **{name: value for name, _, value in lines}}
    found = load_settings(environ)
    return len(found.tiers), found.local_root.is_absolute(), found.policy.fleet_lease


_TOMLS = [
    "".join(f"{v.field} = 1\n" for v in VARIABLES.values() if isinstance(v.default, float | int)),
    f"""
cache_root = "/cache"
remote_cache = "s3://bucket/prefix"
promote = "auto"
compilation_timeout = 1.5
tiers = ["/mnt/a", {{ url = "s3://b/c", region = "r", secret_access_key = "{SECRET}" }}]
""",
    'cache_root = "~/cache"\n[[tiers]]\nurl = "/mnt/a"\nread_only = true\nname = "fsx"\n',
    f'remote_cache = "s3://u:{SECRET}@b/c"\n',
    f'tiers = [{{ url = "s3://b", endpoint_url = "http://u:{SECRET}@h" }}]\n',
]


def _toml(data: bytes, root: Path) -> object:
    root.mkdir(exist_ok=True)
    path = root / "settings.toml"
    path.write_bytes(data)
    found = load_settings({"HOME": str(root), "NEURON_STORE_CONFIG": str(path)})
    for url in found.tiers:
        try:
            open_tier(url).close()
        except ConfigError:
            continue
    return len(found.tiers), found.policy.promote, found.workers


# -- graphs and executables ------------------------------------------------------------


@functools.cache
def _modules() -> list[bytes]:
    fixtures = sorted((HERE.parent / "manifest" / "fixtures").glob("*.hlo"))
    found = [data for path in fixtures if len(data := path.read_bytes()) < 4096]
    return found + [b"\x0a" + _varint(len(data)) + data for data in found[:2]]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


_WIRE = (
    b"\xff" * 9 + b"\x01",
    b"\x80" * 10,
    b"\x1a\xff\xff\xff\xff\x0f",
    b"\x22\x00",
    b"\x0b",
    b"\x0c",
    b"\x22\x02\x12\x00",
    b"\x22\x02\x22\x00" * 8,
    b"\x18" + b"\xff" * 9 + b"\x01",
)


def _hlo_shapes(data: bytes, _root: Path) -> object:
    shape = read_program_shape(data)
    return len(shape.output_shapes()), len(shape.input_shapes())


def _hlo_key(data: bytes, _root: Path) -> object:
    """What a key and the compiler get of a module, and what its metadata says."""
    pieces = [_hlo.key_input(data), _hlo.compiler_input(data)]
    must(_hlo.is_hlo(data), "a module that is none")
    once = b"".join(pieces[1])
    must(b"".join(_hlo.compiler_input(once)) == once, "a rewrite that goes on")
    count, aliased = _hlo.output_count(data), _hlo.aliased_inputs(data)
    return count is None, len(aliased), once == data


# -- the Neuron stack's entries --------------------------------------------------------

_PARTS = b"\n--8<--\n"


def _entry(data: bytes, root: Path) -> object:
    """Executable, metadata and completion mark of an entry that the Neuron stack wrote."""
    shutil.rmtree(root, ignore_errors=True)
    entry, source = root / "tier" / KEY, root / "source"
    names = (f"graph_{KEY}.neff", ".artifact_metadata_v0.json", ".compilation_complete")
    parts = dict(zip(names, data.split(_PARTS), strict=False))
    for folder, content in ((entry, {**_FILES, **parts}), (source, _FILES)):
        folder.mkdir(parents=True)
        for name, piece in content.items():
            (folder / name).write_bytes(piece)
    length = neff_length(parts.get(names[0], b""))
    must(length is None or length >= 1024, f"a NEFF of {length} bytes")
    (root / "out").mkdir()
    tier = LocalStore(root / "tier")
    told: list[object] = [length is None]
    for use in (tier.find, tier.verify, lambda key: tier.fetch(key, root / "out")):
        try:
            told.append(use(KEY) is not None)
        except (ArtifactCorrupt, ArtifactNotFound, TierError) as error:
            told.append(type(error).__name__)
    answer = tier.publish(_artifact(), source)
    if answer is not Publication.CONFLICT:
        tier.verify(KEY)
    return (*told, answer)


# -- notes of other processes ----------------------------------------------------------

_NOTES = [
    (
        b"pid: 4711\nprocess_name: python3\ncmdline: ['python3', '-m', 'vllm']\nrank: 3\n"
        b"timestamp: 1786048631.5\nhost: node-7\n"
    ),
    b"pid: 1\nprocess_name: \ncmdline: []\ntimestamp: nan\n",
]


def _holder_note(data: bytes, root: Path) -> object:
    root.mkdir(exist_ok=True)
    tier = LocalStore(root)
    (root / f".{KEY}.compilation_metadata").write_bytes(data)
    note = read_holder_note(str(root / f".{KEY}.compilation_metadata"))
    if note is None:
        return None
    must(note == tier.lock(KEY, 0).holder(), "a note that reads in two ways")
    told = f"{note} {note.host} {note.timestamp}"
    must(told.isprintable() and len(told) < 400, f"a note that garbles a terminal: {told!r:.500}")
    finite = note.timestamp is None or math.isfinite(note.timestamp)
    must(finite, f"a time that is none: {note.timestamp}")
    return note.rank is None, note.timestamp is None


_LEASE = LeaseRecord("0" * 31 + "1", 7, 30.0, 4711, "node-7")


def _lease_object(data: bytes, _root: Path) -> object:
    record = load_lease(data)
    if record is None:
        return None
    must(load_lease(dump_lease(record)) == record, "a lease that does not read back equal")
    spelled = lease_name(record)
    must(is_file_name(spelled), f"a lease's name that is none: {spelled!r}")
    read = read_name(spelled)
    must(read is not None, f"a lease whose name is none: {spelled}")
    return record.released, record.renewed().counter - record.counter


def is_file_name(name: str) -> bool:
    return "/" not in name and "\0" not in name and len(name) <= 255


def _lease_names(data: bytes, root: Path) -> object:
    """A directory's lease is a file's name; each line is one that somebody left there."""
    shutil.rmtree(root, ignore_errors=True)
    folder = root / LEASES / KEY
    folder.mkdir(parents=True)
    for line in data.split(b"\n")[:20]:
        name = os.fsdecode(line)
        if name not in {"", ".", ".."} and len(line) <= 255 and not {"/", "\0"} & {*name}:
            (folder / name).touch()
    tier = PosixStore(root)
    leases = DirectoryLeases(str(root), tier._trouble)
    try:
        leases.take(KEY, 5.0).release()
    except LeaseHeld as error:
        must(str(error).isprintable(), f"garbles a terminal: {error!r:.300}")
    seen = _look(str(root), KEY)
    if seen is None:
        return None
    read = seen.leases
    # As after a whole ttl without a change.
    lease = leases._take_over(KEY, LeaseRecord.new(5.0), seen)
    must(lease.held(), "a lease that was taken over and is not held")
    lease.release()
    return len(read), len(seen.names) - len(read)


def _failures() -> list[bytes]:
    entry = {
        "id": WRITE_ID,
        "time": 1786048631.5,
        "reason": "exit status 70",
        "compiler": "neuronx-cc",
        "status": 70,
        "log_tail": "[F137] killed",
        "permanent": False,
    }
    return [
        json.dumps({"version": 1, "failures": failures}).encode()
        for failures in ([entry], [], [entry, {**entry, "id": "0" * 32, "status": None}])
    ]


def _failure_note(data: bytes, root: Path) -> object:
    (root / ".failed").mkdir(parents=True, exist_ok=True)
    (root / ".failed" / f"{KEY}.json").write_bytes(data)
    lock = LocalStore(root).lock(KEY, 0)
    found = read_failures(lock, KEY)
    for failure in found:
        must(len(str(failure.error)) < 64 << 10, "an error without end")
    note = note_failure(lock, KEY, CompileError(KEY, "it failed"))
    known = read_failures(lock, KEY)
    must(known[-1] == note, "a failure that is not known to those who wait")
    must(len(known) <= 16, "failures without end")
    return min(len(found), 3)


# -- what people write -----------------------------------------------------------------

_COMMANDS = [
    b"--framework XLA --target trn2 --auto-cast=none --verbose=35 -O2",
    b"neuronx-cc compile /tmp/x/graph.hlo --output=/tmp/x/graph.neff -O1 --lnc=2 -lnc 2",
    b"--internal-hlo2tensorizer-options='--verify-hlo=true --modular-flow-mac-threshold=10'",
    b"--enable-fast-context-switch --disable-fast-context-switch --dump ~/x -O 3 -",
]


def _compiler_flags(data: bytes, _root: Path) -> object:
    text = _decoded(data)
    manifest_flags(text)
    tokens = text.split("\0")
    for flags in (tokens, text):
        once = canonical_flags(flags, target="trn2")
        # Of arguments and of an option that lacks its value, the place in the line has a meaning.
        if all(
            flag.name and (flag.value is not None or flag.name not in NEURONX_CC.valued)
            for flag in parse_flags(flags)
        ):
            must(canonical_flags(once) == once, f"canonical flags that are not: {once[:300]!r}")
        settled_flags(flags)
        last_value(flags, "--optlevel")
        manifest_flags(manifest_flags(flags))
    return min(len(parse_flags(text)), 5), min(len(once), 3)


_JOBS = [
    b'{"compiler": "neuronx-cc", "graph": "graph.hlo", "flags": ["--target=trn2", "-O1"]}\n',
    (
        b'{"compiler": "iree", "graph": "graph.mlir", "flags": "--iree-opt-level=O2", '
        b'"extra": {"kernel": "1f", "n": [1, 2.5, null]}}\n'
    ),
    (
        b'\n{"compiler": "iree", "graph": "./graph.mlir"}\n\n'
        b'{"compiler": "neuronx-cc", "graph": "graph.hlo", "flags": "--target trn2"}\n'
    ),
]


def _jobs(data: bytes, root: Path) -> object:
    if not root.exists():
        root.mkdir()
        for suffix in ("hlo", "mlir"):
            shutil.copyfile(EXAMPLES / f"decode.{suffix}", root / f"graph.{suffix}")
        os.mkfifo(root / "pipe")
    (root / "jobs.jsonl").write_bytes(data)
    jobs = [read_jobs(root / "jobs.jsonl", inline=inline) for inline in (False, True)]
    must([j.key for j in jobs[0]] == [j.key for j in jobs[1]], "in-line jobs have other keys")
    must(all(is_key(job.key) for job in jobs[0]), "a key that is none")
    return len(jobs[0])


def _byte_size(data: bytes, _root: Path) -> object:
    size = parse_bytes(_decoded(data), option="--max-size")
    must(0 <= size < 1 << 63, f"{size} bytes")
    return human_bytes(size)[-3:]


def _duration(data: bytes, _root: Path) -> object:
    seconds = parse_duration(_decoded(data), option="--older-than")
    must(0 <= seconds < 3.2e9, f"{seconds} seconds")
    return human_duration(seconds)[-1]


def _key(data: bytes, root: Path) -> object:
    """Nothing is built from a key or a file's name that is none."""
    root.mkdir(exist_ok=True)
    key = _decoded(data)
    tier = LocalStore(root)
    must(tier.find(key) is None and tier.path_of(key) is None, "found what nobody published")
    must(not tier.delete(key), "deleted what is not there")
    with tier.lock(key, 0):
        pass
    try:
        tier.open_file(key, key)
    except (ArtifactNotFound, InvalidRecord):
        pass
    try:
        _store.find(key)
    finally:
        _objects()
    return len(key) > 100


TARGETS: tuple[Target, ...] = (
    Target("record", _record, (InvalidRecord,), _records, strategy=_RECORD),
    Target("record_in_tier", _record_in_tier, (TierError,), _records, strategy=_RECORD),
    Target("record_in_objects", _record_in_objects, (), _records, strategy=_RECORD),
    Target(
        "manifest",
        _manifest,
        (ManifestError,),
        _manifests,
        (b'"graphs": ', b'"extra": ', b'"ranks": [', b'"1.1"'),
        strategy=_object(
            manifest_version=st.sampled_from(["1", "1.1", "2"]),
            config=st.dictionaries(st.sampled_from(["model", "topology", "target"]), _json),
            graphs=st.lists(st.fixed_dictionaries({"graph_hash": st.just(KEY)}), max_size=2),
            environment=st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
        ),
    ),
    Target(
        "ledger",
        _ledger,
        (),
        lambda: [_LEDGER, _LEDGER * 3, _LEDGER + _LEDGER[:40]],
        strategy=_object(
            key=st.just(KEY),
            rank=st.integers(0, 9),
            input_shapes=st.lists(st.text(max_size=4), max_size=3),
            compiler_flags=st.text(max_size=20),
        ),
    ),
    Target(
        "settings",
        _settings,
        (ConfigError,),
        lambda: ["\n".join(f"{k}={v}" for k, v in e.items()).encode() for e in _ENVIRONMENTS],
        (*(name.encode() + b"=" for name in VARIABLES), *_URL_TOKENS),
        strategy=st.dictionaries(st.sampled_from([*VARIABLES, "HOME"]), st.text(max_size=20)).map(
            lambda d: "\n".join(f"{k}={v}" for k, v in d.items()).encode("utf-8", "surrogatepass")
        ),
        secret=_environment_has_credential,
    ),
    Target(
        "toml",
        _toml,
        (ConfigError,),
        lambda: [text.encode() for text in _TOMLS],
        (
            *(v.field.encode() + b" = " for v in VARIABLES.values()),
            b"[[tiers]]\n",
            b"{ url = ",
            b'"""',
            b"1979-05-27",
            b"inf",
            b'{ password = "' + SECRET.encode() + b'" }',
        ),
        strategy=st.dictionaries(
            st.sampled_from([v.field for v in VARIABLES.values()]),
            st.sampled_from(["1", "-1", "nan", '"auto"', "[]", '["/a"]', "{}", '"s3://b"', "1_0"])
            | st.text(max_size=9),
        ).map(lambda d: "\n".join(f"{k} = {v}" for k, v in d.items()).encode("utf-8", "replace")),
        secret=_has_credential,
    ),
    Target(
        "tier_url",
        _tier_url,
        (ConfigError,),
        lambda: [url.encode() for url in _URLS],
        _URL_TOKENS,
        strategy=_text("s3az:/?#@&=%.~pox[] 0"),
        secret=_url_has_credential,
    ),
    Target("hlo", _hlo_shapes, (HloError,), _modules, _WIRE),
    Target("hlo_key", _hlo_key, (ConfigError,), _modules, _WIRE),
    Target(
        "neff",
        _entry,
        (),
        lambda: [_PARTS.join(list(_FILES.values())[1:]), neff(b"")],
        (b"neff_size:", b"completed:", b"\x02" + b"\0" * 7, b"\0\x04" + b"\0" * 6, _PARTS),
    ),
    Target(
        "holder_note",
        _holder_note,
        (),
        lambda: _NOTES,
        (b"pid: ", b"timestamp: ", b"host: ", b"rank: ", b"inf", b"\x1b[2J"),
        strategy=_text("pid: 0123\nhostrank"),
    ),
    Target(
        "lease_object",
        _lease_object,
        (),
        lambda: [dump_lease(_LEASE), dump_lease(attrs.evolve(_LEASE, released=True, ttl=2))],
        strategy=_object(
            version=st.just(1),
            token=st.just(WRITE_ID),
            counter=st.integers(0, 10**16),
            ttl=st.floats() | st.integers(0, 1000),
            pid=st.integers(0, 10**11),
            host=st.text("ab.-_", max_size=70),
            released=st.booleans(),
        ),
    ),
    Target(
        "lease_name",
        _lease_names,
        (LeaseHeld, TierError),
        lambda: [
            lease_name(_LEASE).encode(),
            "\n".join(lease_name(r) for r in (_LEASE, _LEASE.renewed())).encode(),
        ],
        (b"1,", b",30,", b",0.001,", b".nfs0001"),
        strategy=_text("1,0af.\n"),
    ),
    Target(
        "failure_note",
        _failure_note,
        (),
        _failures,
        strategy=_object(version=st.just(1), failures=st.lists(_json, max_size=3)),
    ),
    Target(
        "compiler_flags",
        _compiler_flags,
        (ConfigError,),
        lambda: _COMMANDS,
        (b" -O", b" --", b"=", b"'", b" --target ", b"/tmp/", b"~/", b"$HOME/", b" -- "),
        strategy=_text("-O=' /~$\\\"1tarlnc\n"),
    ),
    Target(
        "jobs",
        _jobs,
        (ConfigError, InvalidArtifact, Unsupported),
        lambda: _JOBS,
        (b'"pipe"', b'"/dev/zero"', b'"."', b'"compiler": ', b'"flags": ', b'"extra": '),
        strategy=_object(
            compiler=st.sampled_from(["iree", "neuronx-cc"]),
            graph=st.sampled_from(["graph.hlo", "graph.mlir", "pipe", "."]),
            flags=st.text(max_size=9),
            extra=st.dictionaries(st.text(max_size=4), _json),
        ),
    ),
    Target(
        "byte_size",
        _byte_size,
        (ConfigError,),
        lambda: [b"20G", b"500 MiB", b"0.5t", b"2000000000", b"1e3k"],
        (b"_", b"e", b".", b"kib", b"inf", b"nan"),
        strategy=_text("0123456789.e_kMGTiB -+"),
    ),
    Target(
        "duration",
        _duration,
        (ConfigError,),
        lambda: [b"30d", b"1d 12h", b"90 m", b"2w", b"0s"],
        (b".", b"s", b"w"),
        strategy=_text("0123456789. smhdw-"),
    ),
    Target(
        "key",
        _key,
        (InvalidKey,),
        lambda: [KEY.encode(), b"MODULE_1a2b+3c4d", b"a" * 200],
        (b"/", b"..", b".", b"\n", b"%2f", b"con"),
        strategy=_text("abcABC019._+=-/"),
    ),
    *TRUST_TARGETS,
)
