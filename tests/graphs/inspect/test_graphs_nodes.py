"""Plain values of the audit: words, ranges of memory, names, drawings."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.inspect.allocations import Allocation, Allocations, State, mapped_by_host
from ostinato.graphs.inspect.demangle import demangle
from ostinato.graphs.inspect.dot import short_name, to_dot
from ostinato.graphs.inspect.nodes import Edge, GraphNodes, Node, aligned_words

DEVICE_ADDRESS = st.integers(1 << 32, (1 << 57) - 1)


@given(st.integers(0, 64), st.binary(max_size=80))
def test_words_are_the_aligned_ones_in_range(offset, data):
    expected = [
        (at, value)
        for at in range(len(data) - 7)
        if (offset + at) % 8 == 0
        and 1 << 32 <= (value := struct.unpack_from("<Q", data, at)[0]) < 1 << 57
    ]
    assert aligned_words(offset, data) == expected


@given(st.binary(max_size=40), DEVICE_ADDRESS, st.binary(max_size=40))
def test_an_address_is_found_wherever_a_struct_aligns_it(before, address, after):
    before += b"\0" * (-len(before) % 8)
    words = aligned_words(0, before + struct.pack("<Q", address) + after)
    assert (len(before), address) in words


RANGES = st.lists(
    st.builds(
        lambda start, size, state: Allocation(start, size, "", state),
        st.integers(0, 60),
        st.integers(0, 20),
        st.sampled_from(State),
    ),
    max_size=12,
)


@given(RANGES)
def test_an_address_belongs_to_the_first_range_that_holds_it(ranges):
    allocations = Allocations(ranges)
    for address in range(-1, 90):
        holding = [a for a in ranges if a.start <= address < a.end]
        assert allocations.find(address) == (holding[0] if holding else None)


@given(RANGES)
def test_the_span_is_from_the_first_byte_to_the_last(ranges):
    allocations, real = Allocations(ranges), [a for a in ranges if a.size]
    for address in range(-1, 90):
        inside = bool(real) and min(a.start for a in real) <= address < max(a.end for a in real)
        assert allocations.spans(address) == inside


def test_host_mappings_are_told_from_driver_reservations(tmp_path):
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python with spaces\n"
        b"00500000-00501000 r-xp 00000000 08:02 173522      /home/caf\xe9/\x0clib.so\n"
        b"7f0000000000-7f0040000000 ---p 00000000 00:00 0 \n"
        b"7f0100000000-7f0100200000 rw-s 00000000 00:06 515  /dev/nvidia-uvm\n"
        b"7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0    [stack]\n"
    )
    assert [(a.start, a.size) for a in mapped_by_host(maps)] == [
        (0x400000, 0x52000),
        (0x500000, 0x1000),
        (0x7FFC00000000, 0x1000),
    ]
    assert mapped_by_host(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_ZN2at6native4fillIfEEvPT_i", "void at::native::fill<float>(float*, int)"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("_Znonsense", "_Znonsense"),
        ("", ""),
    ],
)
def test_demangled_names(name, expected):
    assert demangle(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::fill<float>(float*, int)", "at::native::fill<float>"),
        ("void (anonymous namespace)::f<(int)4>(g(int))", "f<4>"),
        ("plain", "plain"),
        ("(all of it)", "(all of it)"),
        ("x" * 70, "x" * 59 + "…"),
    ],
)
def test_short_names(name, expected):
    assert short_name(name) == expected


def test_a_drawing_has_every_node_and_edge():
    nodes = [Node("kernel", 'void f<"a">(int)', (2, 1, 1), (64, 1, 1)), Node("memset")]
    text = to_dot(GraphNodes(nodes, [Edge(0, 1), Edge(0, 1, True)]), 'batch "1"')
    assert text == (
        'digraph "batch \\"1\\"" {\n'
        "  node [shape=box];\n"
        '  n0 [label="0 kernel\\nf<\\"a\\">\\n2×1×1 of 64×1×1"];\n'
        '  n1 [label="1 memset"];\n'
        "  n0 -> n1;\n"
        "  n0 -> n1 [style=dashed, label=PDL];\n"
        "}\n"
    )
