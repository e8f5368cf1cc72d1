"""Unsigned integers of any length (LEB128) and a reader that never runs past its bytes."""

from __future__ import annotations

from anycostfl.errors import PayloadError

MAX_VARINT_BYTES = 9


def varint(number: int) -> bytes:
    """Seven bits a byte, lowest first; a set high bit says that another byte follows."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class Reader:
    """Consume bytes from the front; whatever is missing or malformed is a `PayloadError`."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._what, self._at = data, what, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self._at + count
        if end > len(self._data):
            raise PayloadError(
                f"{self._what} ends early: {count} bytes wanted at offset {self._at}, "
                f"{len(self._data) - self._at} left"
            )
        taken, self._at = self._data[self._at : end], end
        return taken

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def varint(self, least: int, most: int) -> int:
        """The next integer, in its shortest form and within [least, most]."""
        number = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self.byte()
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                if place and byte == 0:
                    raise PayloadError(f"{self._what}: an integer is not in its shortest form")
                break
        else:
            raise PayloadError(f"{self._what}: an integer has more than {MAX_VARINT_BYTES} bytes")
        if not least <= number <= most:
            raise PayloadError(f"{self._what}: {number} is outside {least} to {most}")
        return number

    def rest(self) -> bytes:
        """Everything that is left."""
        return self.take(len(self._data) - self._at)

    @property
    def empty(self) -> bool:
        """Whether everything has been read."""
        return self._at == len(self._data)

    def finish(self) -> None:
        """Nothing may be left."""
        if not self.empty:
            left = len(self._data) - self._at
            raise PayloadError(f"{self._what} has {left} bytes too many")
