import importlib.util
import io
import json
import os
import resource

import pytest

from neuron_store.errors import HloError
from neuron_store.manifest._wire import MAX_FIELDS
from neuron_store.manifest.hlo import MAX_DEPTH, read_output_shapes, read_program_shape
from tests.manifest.entries import FIXTURES
from tests.manifest.fuzz_hlo import run, varint

EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape(*dimensions: int, element: int = 11, packed: bool = True) -> bytes:
    if packed:
        sizes = field(3, b"".join(map(varint, dimensions))) if dimensions else b""
    else:
        sizes = b"".join(field(3, size) for size in dimensions)
    return field(2, element) + sizes


def tuple_of(*shapes: bytes) -> bytes:
    return field(2, 13) + b"".join(field(4, each) for each in shapes)


def program(result: bytes, *parameters: bytes) -> bytes:
    return b"".join(field(1, each) for each in parameters) + field(2, result)


def computation(
    program_shape: bytes | None, identity: int | None = None, name: bytes = b"c"
) -> bytes:
    return (
        field(1, name)
        + (b"" if program_shape is None else field(4, program_shape))
        + (b"" if identity is None else field(5, identity))
    )


def module(*computations: bytes, entry: int | None = None, entry_name: bytes = b"") -> bytes:
    return (
        field(1, b"jit_f")
        + (field(2, entry_name) if entry_name else b"")
        + b"".join(field(3, each) for each in computations)
        + (b"" if entry is None else field(6, entry))
    )


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_shapes_are_those_that_jaxlibs_own_parser_tells(name):
    with open(FIXTURES / f"{name}.hlo", "rb", buffering=0) as stream:
        found = read_program_shape(stream)
    assert [list(leaf.dimensions) for leaf in found.result.leaves()] == EXPECTED[name]["results"]
    parameters = [list(leaf.dimensions) for p in found.parameters for leaf in p.leaves()]
    assert parameters == EXPECTED[name]["parameters"]


@pytest.mark.torch
def test_shapes_agree_with_jax_as_it_is_installed_here():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: the committed fixtures stand for it")
    from tests.manifest.fixtures import make_hlo

    for name, data in make_hlo.modules().items():
        found = read_program_shape(data)
        said = make_hlo.said_by_jaxlib(data)
        assert [list(x.dimensions) for x in found.result.leaves()] == said["results"], name


def test_shape_strings_are_spelled_as_in_the_vendors_example():
    found = read_program_shape((FIXTURES / "decode.hlo").read_bytes())
    assert found.output_shapes() == ["4", "4, 512", "8, 4, 64"]
    assert found.input_shapes() == ["4,", "4,", "8, 4, 64", "512, 64"]
    scalar = read_program_shape(module(computation(program(shape(), shape()))))
    assert scalar.output_shapes() == [""]
    assert scalar.input_shapes() == [""]


def test_tuples_are_flattened_in_order_and_an_empty_one_gives_nothing():
    nested = tuple_of(shape(1), tuple_of(shape(2, 3), tuple_of(), tuple_of(shape())), shape(4))
    assert read_output_shapes(module(computation(program(nested)))) == ["1", "2, 3", "", "4"]
    assert read_output_shapes(module(computation(program(tuple_of())))) == []
    assert read_output_shapes(module(computation(program(shape(5, 6))))) == ["5, 6"]


def test_packed_and_unpacked_dimensions_read_the_same():
    for packed in (True, False):
        assert read_output_shapes(
            module(computation(program(shape(4, 300, 70000, packed=packed))))
        ) == ["4, 300, 70000"]


def test_a_dynamic_dimension_shows_its_bound_and_an_unbounded_one_a_mark():
    dynamic = shape(8, 16) + field(6, varint(1) + varint(0))
    found = read_program_shape(module(computation(program(dynamic))))
    assert found.output_shapes() == ["8, 16"]
    assert found.result.dynamic == (True, False)
    assert read_output_shapes(module(computation(program(shape(-(1 << 63), 4))))) == ["?, 4"]


def test_tokens_and_opaque_values_have_no_dimensions():
    assert read_output_shapes(
        module(computation(program(tuple_of(shape(element=17), shape(3, element=14)))))
    ) == ["", ""]


def test_the_entry_is_found_by_id():
    data = module(
        computation(program(shape(1)), 1),
        computation(program(shape(2)), 2),
        computation(program(shape(3)), 3),
        entry=2,
    )
    assert read_output_shapes(data) == ["2"]


def test_an_absent_id_means_zero_on_both_sides():
    assert read_output_shapes(
        module(computation(program(shape(1)), 7), computation(program(shape(2))))
    ) == ["2"]


def test_an_id_that_nobody_has_falls_back_to_the_name():
    data = module(
        computation(program(shape(1)), 1, b"main"),
        computation(program(shape(2)), 2, b"other"),
        entry=9,
        entry_name=b"main",
    )
    assert read_output_shapes(data) == ["1"]


def test_among_several_without_an_id_the_name_decides():
    data = module(
        computation(program(shape(1)), None, b"main"),
        computation(program(shape(2)), None, b"other"),
        entry_name=b"main",
    )
    assert read_output_shapes(data) == ["1"]


@pytest.mark.timeout(120)
def test_many_computations_of_one_name_take_no_longer_than_many_of_several():
    """The search took a time that grew with their square: ten minutes for these."""
    same = b"".join([field(3, field(1, b"e"))] * 100_000)
    with pytest.raises(HloError):
        read_output_shapes(field(2, b"e") + same)


def test_without_an_entry_the_modules_own_program_shape_counts():
    data = module(computation(program(shape(1)), 1), entry=5) + field(4, program(shape(9)))
    assert read_output_shapes(data) == ["9"]


def test_without_any_program_shape_the_root_instruction_counts():
    def instruction(number: int, result: bytes) -> bytes:
        return field(
            2, field(1, b"add") + field(3, result) + field(8, b"x" * 50) + field(35, number)
        )

    entry = (
        field(1, b"main") + instruction(4, shape(1)) + instruction(5, tuple_of(shape(2), shape(3)))
    )
    data = module(entry + instruction(6, shape(4)) + field(5, 2) + field(6, 5), entry=2)
    assert read_output_shapes(data) == ["2", "3"]


def test_a_message_that_occurs_twice_is_merged():
    split = field(4, field(2, field(2, 13) + field(4, shape(1)))) + field(
        4, field(2, field(4, shape(2)))
    )
    assert read_output_shapes(field(1, b"m") + field(3, field(1, b"c") + split)) == ["1", "2"]


def test_an_hlo_proto_wrapper_is_seen_through_with_and_without_a_buffer_assignment():
    inner = (FIXTURES / "decode.hlo").read_bytes()
    for data in (field(1, inner), field(1, inner) + field(3, field(4, b"\x08\x01"))):
        assert read_output_shapes(data) == ["4", "4, 512", "8, 4, 64"]


def test_a_module_without_id_is_not_taken_for_a_wrapper():
    assert read_output_shapes(module(computation(program(shape(6))))) == ["6"]


def test_unknown_fields_of_every_wire_type_are_skipped():
    unknown = field(99, 5) + field(98, b"zz") + varint(97 << 3 | 1) + b"8" * 8 + varint(96 << 3 | 5)
    unknown += b"4" * 4
    data = unknown + module(
        computation(unknown + program(shape(1) + unknown) and program(shape(3)))
    )
    assert read_output_shapes(data) == ["3"]
    # A known number with another wire type is an unknown field.
    assert read_output_shapes(field(3, 1) + field(6, b"x") + data) == ["3"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no HLO module"),
        (b"hello world, this is text", "damaged"),
        (field(3, b"\x12\x7f"), "damaged at byte"),
        (module(computation(program(shape(1))))[:-3], "damaged at byte"),
        (b"\x1a" + b"\xff" * 10, "does not end"),
        (b"\x00\x00", "field number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0d\x01", "cut off"),
        (module(computation(None), entry=0), "names no entry"),
        (field(1, b"x"), "no HLO module"),
    ],
)
def test_what_is_no_module_gives_a_typed_error_that_says_why(data, reason):
    with pytest.raises(HloError, match=reason):
        read_program_shape(data)


def test_tuples_nested_without_end_are_refused():
    deep = shape(1)
    for _ in range(MAX_DEPTH + 2):
        deep = tuple_of(deep)
    with pytest.raises(HloError, match="deep"):
        read_program_shape(module(computation(program(deep))))


def test_dimensions_and_fields_beyond_measure_are_refused():
    with pytest.raises(HloError, match="shapes and dimensions"):
        read_program_shape(module(computation(program(field(3, b"\x01" * 1_100_000)))))
    with pytest.raises(HloError, match=f"more than {MAX_FIELDS}"):
        read_program_shape(b"\x28\x01" * (MAX_FIELDS + 1))
    with pytest.raises(HloError, match="parts of one kind"):
        read_program_shape(b"\x1a\x00" * 300_000)


class Counting(io.FileIO):
    taken = 0

    def read(self, size=-1):
        data = super().read(size)
        self.taken += len(data)
        return data

    def readall(self):
        raise AssertionError("the whole file was asked for")


@pytest.mark.parametrize("where", ["instruction", "unknown field"])
def test_a_gigabyte_of_constants_is_skipped_unread(tmp_path, where):
    """A sparse file with one literal of 1 GiB in the middle of the entry computation."""
    size = 1 << 30
    after = field(4, program(tuple_of(shape(4), shape(4, 49152)), shape(4))) + field(5, 2)
    name = field(1, b"main")
    number = 2 if where == "instruction" else 77
    header = varint(number << 3 | 2) + varint(size)
    inner = len(name) + len(header) + size + len(after)
    start = field(1, b"jit_f") + varint(3 << 3 | 2) + varint(inner) + name + header
    path = tmp_path / "graph.hlo"
    with open(path, "wb") as stream:
        stream.write(start)
        stream.seek(size, os.SEEK_CUR)
        stream.write(after + field(6, 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Counting(path) as stream:
        found = read_program_shape(stream)
        assert stream.taken < 1 << 18
    assert found.output_shapes() == ["4", "4, 49152"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_a_stream_that_cannot_seek_is_refused_with_the_remedy():
    class Pipe(io.RawIOBase):
        def readable(self):
            return True

    with pytest.raises(HloError, match="into memory"):
        read_program_shape(Pipe())


def test_a_file_that_shrinks_meanwhile_gives_a_typed_error():
    class Shrinking(io.BytesIO):
        def read(self, size=-1):
            return super().read(size)[:0]

    with pytest.raises(HloError, match="shorter"):
        read_program_shape(Shrinking((FIXTURES / "one.hlo").read_bytes()))


def test_mutated_modules_give_shapes_or_a_typed_error_and_nothing_else():
    """A short replay; `python tests/manifest/fuzz_hlo.py 100000` is the long one."""
    result = run(3000, seed=7)
    assert result["read"] + result["refused"] == 3000
    assert result["read"] > 100
    assert result["refused"] > 100
