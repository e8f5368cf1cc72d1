"""The frame says exactly what docs/wire-format.md says, and refuses what it should."""

import struct
import zlib
from pathlib import Path

import pytest
import torch

from anycostfl import methods
from anycostfl.codec import Upload, compress, decompress, frame
from anycostfl.codec.frame import OVERHEAD
from anycostfl.codec.sections import bytes_by_section
from anycostfl.errors import PayloadError
from mutations import join, seal, split

SHAPES = {"w": (40, 32), "b": (64,)}


@pytest.fixture
def payload() -> bytes:
    draw = torch.Generator().manual_seed(0)
    update = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return compress(update, 0.25, seed=0, binding=b"plan")


def refused(payload: bytes, binding: bytes = b"plan") -> str:
    with pytest.raises(PayloadError) as caught:
        decompress(payload, SHAPES, binding=binding)
    return str(caught.value)


def test_header_fields_lie_where_the_documentation_says(payload: bytes) -> None:
    assert payload[:4] == b"ACFU"
    assert payload[4:6] == bytes([1, 0])
    assert struct.unpack_from("<I", payload, 6) == (len(payload),)
    assert struct.unpack_from("<I", payload, 18) == (zlib.crc32(b"b:[64]\nw:[40, 32]"),)
    assert struct.unpack_from("<I", payload, len(payload) - 4) == (zlib.crc32(payload[:-4]),)
    kinds = [kind for kind, _ in split(payload)]
    assert kinds[:2] == [0x81, 0x81]
    assert kinds[-1] == 0x86


def test_empty_update_is_header_and_checksum() -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    payload = compress(zeros, 1.0, seed=0)
    assert len(payload) == OVERHEAD == 26
    assert not any(tensor.any() for tensor in decompress(payload, SHAPES).values.values())


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"PK", "not a payload"),
        (4, b"\x02", "format 2.0"),
        (10, b"\0\0\0\0", "another run, round, device or plan"),
        (18, b"\0\0\0\0", "other parameter names or shapes"),
    ],
)
def test_forged_header_is_named(payload: bytes, at: int, data: bytes, message: str) -> None:
    assert message in refused(seal(payload[:at] + data + payload[at + len(data) :]))


def test_wrong_binding_and_wrong_shapes_are_named(payload: bytes) -> None:
    assert "another run" in refused(payload, binding=b"other")
    with pytest.raises(PayloadError, match="names or shapes"):
        decompress(payload, {"w": (32, 40), "b": (64,)}, binding=b"plan")


def test_damage_truncation_and_excess_are_named(payload: bytes) -> None:
    damaged = bytearray(payload)
    damaged[40] ^= 1
    assert "checksum mismatch" in refused(bytes(damaged))
    assert f"declares {len(payload)} bytes but has" in refused(payload[:-1])
    assert f"declares {len(payload)} bytes but has" in refused(payload + b"\0")
    assert "at least 26 are needed" in refused(b"")


def as_minor(payload: bytes, minor: int) -> bytes:
    return seal(payload[:5] + bytes([minor]) + payload[6:])


def test_optional_section_of_a_later_minor_version_is_skipped(payload: bytes) -> None:
    extra = join(payload, [*split(payload)[:2], (0x01, b"later"), *split(payload)[2:]])
    now = decompress(payload, SHAPES, binding=b"plan")
    later = decompress(as_minor(extra, 1), SHAPES, binding=b"plan")
    assert all(torch.equal(now.values[name], later.values[name]) for name in SHAPES)
    assert "unknown section 0x01 in format 1.0" in refused(extra)


def test_critical_section_of_a_later_minor_version_is_refused(payload: bytes) -> None:
    extra = join(payload, [*split(payload), (0xF0, b"later")])
    assert "unknown section 0xf0 in format 1.1" in refused(as_minor(extra, 1))


@pytest.mark.parametrize(
    ("method", "codec"),
    [("fedavg", ""), ("stc", ""), ("anycostfl", "lowrank")],
)
def test_a_format_without_sections_is_read_in_its_own_version_only(method: str, codec: str) -> None:
    update = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    chosen = methods.load(method)
    issued = Upload(1.0, 0, b"plan", codec=codec)
    payload = chosen.encode(update, issued)
    chosen.decode(payload, SHAPES, issued)
    with pytest.raises(PayloadError, match=r"has format 1\.1, expected 1\.0"):
        chosen.decode(as_minor(payload, 1), SHAPES, issued)


def test_a_payload_ends_where_its_length_field_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_LENGTH", 100)  # really 4 GiB
    binding = frame.payload_binding(b"plan", SHAPES)
    assert len(frame.seal(b"ACFS", bytes(100 - OVERHEAD), binding)) == 100
    with pytest.raises(PayloadError, match="101 bytes; the format allows 100"):
        frame.seal(b"ACFS", bytes(101 - OVERHEAD), binding)


def test_sections_must_be_complete_single_and_in_order(payload: bytes) -> None:
    sections = split(payload)
    for wrong in (sections[:-1], [*sections, sections[-1]], sections[::-1], sections[2:]):
        assert "missing, repeated or out of order" in refused(join(payload, wrong))
    swapped = [sections[1], sections[0], *sections[2:]]
    assert "tensor sections" in refused(join(payload, swapped))


def with_section(payload: bytes, kind: int, data: bytes) -> bytes:
    return join(payload, [(k, data if k == kind else d) for k, d in split(payload)])


@pytest.mark.parametrize(
    ("u_min", "u_max"),
    [(float("nan"), 1.0), (0.0, float("inf")), (2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)],
)
def test_range_must_be_finite_ordered_and_positive(
    payload: bytes, u_min: float, u_max: float
) -> None:
    forged = struct.pack("<ff", u_min, u_max) + b"\x08"
    assert "finite, ordered and positive" in refused(with_section(payload, 0x82, forged))


def test_levels_are_bounded(payload: bytes) -> None:
    for count in (b"\x00", b"\xff\xff\xff\x07"):
        forged = struct.pack("<ff", 0.0, 1.0) + count
        assert "outside 1 to" in refused(with_section(payload, 0x82, forged))


def test_signs_are_one_bit_for_every_symbol_above_zero() -> None:
    update = {"w": torch.tensor([[0.5, -0.5, 0.5, 0.0] * 4])}
    payload = compress(update, 1.0, seed=0)
    signs = dict(split(payload))[0x86]
    assert signs == bytes([0b10010010, 0b0100])  # 12 of them, every third is negative
    for wrong, message in (
        (signs + b"\0", "12 signs take 2 bytes, not 3"),
        (bytes([signs[0], signs[1] | 0x10]), "not padded with zeros"),
    ):
        with pytest.raises(PayloadError, match=message):
            decompress(with_section(payload, 0x86, wrong), update)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (b"\x02\x20\x01\x00", "outside 0 to 1"),  # there are two tensors
        (b"\x00\x41\x01\x00", "kernels of 65 in rows of 64"),
        (b"\x00\x00\x01\x00", "outside 1 to"),
        (b"\x00\x20\x03\x00", "3 of 2 kernels"),
        (b"\x00\x20\x01\x00", "all 2 kernels"),
    ],
)
def test_tensor_sections_are_checked(payload: bytes, section: bytes, message: str) -> None:
    sections = split(payload)
    assert message in refused(join(payload, [(0x81, section), *sections[2:]]))


def test_every_byte_is_accounted_for(payload: bytes) -> None:
    spent = bytes_by_section(payload)
    assert sum(spent.values()) == len(payload)
    assert set(spent) == {"mask", "levels", "signs", "table", "header"}
    assert spent["signs"] == len(dict(split(payload))[0x86])


def test_documented_example_is_what_the_encoder_writes() -> None:
    text = (Path(__file__).parents[1] / "docs/wire-format.md").read_text()
    lines = text.rpartition("## Example")[2].split("```")[1].strip().splitlines()
    documented = bytes.fromhex("".join(line[:44] for line in lines))
    rows = torch.tensor([[0.5, -0.5, 0, 0.5], [0, 0, 0, 0], [-0.5, 0.5, 0.5, 0.5]])
    update = {"w": rows.repeat(1, 4)}
    assert compress(update, 1.0, seed=0, blocks={"w": 8}, binding=b"round 7") == documented
    decoded = decompress(documented, update, binding=b"round 7")
    assert torch.equal(decoded.values["w"], update["w"])
    assert decoded.masks["w"].sum(1).tolist() == [16, 0, 16]
