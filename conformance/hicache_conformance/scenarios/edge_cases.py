"""Edge cases for stores: bytes that look like other data, similar hashes, odd numbers."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import zlib
from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

_BATCH_SIZES = (
    *(1, 2, 3, 5, 8, 9, 10, 11, 16, 17, 32, 33, 64, 65, 100, 101, 128, 129, 200, 256, 257),
    *(512, 1000, 1024),
)
"""Sizes around those at which stores split batches: whole pieces, and one page more."""
_MOST_SEGMENTS = 512
_EQUAL_CHECKSUMS = (
    "32c3c1de684896929855599feb5a6a672d51a3fbabebde8b170a420bb71d86c3",
    "3c84110c446884955d190a054a175389da6eebaf3c2ab7957d3fad7e9c3d4e83",
)
"""Two page hashes whose texts have the same CRC-32."""
_EQUAL_IN_32_BITS = {
    "SHA-256": (47489, 78506),
    "SHA-1": (23313, 86719),
    "MD5": (59078, 62570),
    "BLAKE2b": (62640, 63618),
    "xxHash32": (65983, 76881),
    "xxHash64, the last bits": (85675, 95218),
    "xxh3-64, the last bits": (32835, 110948),
    "CRC-32 of the bytes": (81089, 99217),
    "Adler-32": (1320, 3583),
    "FNV-1a": (34754, 64320),
    "djb2": (17544, 21989),
    "MurmurHash3": (13810, 57050),
}
"""Numbers, by a hash function. The SHA-256 of their decimal digits are page hashes whose texts have the
same first 32 bits under that function."""

_CRC_POLYNOMIALS = (0xEDB88320 << 1 | 1, 0x82F63B78 << 1 | 1)
"""The generators of CRC-32 and CRC-32C, lowest bit first. A page has the same CRC if its bits are
inverted where the generator has a one."""
_CRC_NBYTES = 5
_EQUAL_ADLER = (bytes([10, 20, 30]), bytes([11, 18, 31]))

PAGE_SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 12345, 65535, 65536, 65537, 100003),
)
FEW_PAGE_SIZES = (1, 2, 3, 7, 64, 127, 513, 1000, 4096, 4097, 65537)


def batch_sizes(limit: int) -> list[int]:
    """Return the batch sizes to try, up to `limit` and including `limit`."""
    return [size for size in _BATCH_SIZES if size < limit] + [limit]


def deceptive_bytes(nbytes: int, rng: random.Random) -> dict[str, bytes]:
    """Return contents of `nbytes` that code between caller and store may misread, by description."""
    random_bytes = rng.randbytes(nbytes)
    half = random_bytes[: nbytes // 2]
    starts = {
        "random bytes": random_bytes,
        "zeros only": b"",
        "0xff only": b"\xff" * nbytes,
        "spaces and line ends only": b" \r\n\t" * nbytes,
        "zeros in the second half": half,
        "zeros in the first half": bytes(nbytes - len(half)) + half,
        "one zero in the middle": bytes(map(_not_zero, half)) + b"\0" + b"\x01" * nbytes,
        "lines that end with CR LF": b"line\r\n" * nbytes,
        "white space at both ends": b"\n " + random_bytes[4:] + b" \n",
        "decimal digits": b"0123456789" * nbytes,
        "hexadecimal digits": b"00ff" * nbytes,
        "base64": b"AAAA" * nbytes,
        "UTF-8 with a byte order mark": b"\xef\xbb\xbf" + b"\xc3\xa9" * nbytes,
        "not UTF-8": b"\x80\xc3\x28\xfe\xff" * nbytes,
        "quotes and escapes": b"'\";--\\x00\\n%00%s{}$()" * nbytes,
        "JSON": b'{"found": false, "pages": null}',
        "the word None": b"None",
        "a gzip file": gzip.compress(bytes(16), mtime=0),
        "a zlib stream": zlib.compress(bytes(16)),
        "a pickle": pickle.dumps(b"x" * 16),
    }
    return {
        description: start[:nbytes].ljust(nbytes, b"\0") for description, start in starts.items()
    }


def _not_zero(value: int) -> int:
    return value or 1


def nearly_equal(nbytes: int, rng: random.Random) -> list[bytes]:
    """Return pages that differ in one byte or in the order of bytes, or have equal checksums."""
    base = rng.randbytes(nbytes)
    places = {0, 1, nbytes // 4, nbytes // 2, 3 * nbytes // 4, nbytes - 2, nbytes - 1}
    changed = [
        _with(base, place, base[place] ^ 1) for place in sorted(places) if 0 <= place < nbytes
    ]
    half = nbytes // 2
    swapped = base[half:] + base[:half]
    return list(dict.fromkeys([base, *changed, swapped, base[::-1], *_of_equal_checksums(base)]))


def _of_equal_checksums(base: bytes) -> list[bytes]:
    """Return pages that have the CRC-32, the CRC-32C or the Adler-32 of another one or of `base`."""
    if len(base) < _CRC_NBYTES:
        return []
    start, rest = base[:_CRC_NBYTES], base[_CRC_NBYTES:]
    number = int.from_bytes(start, "little")
    shifted = [number ^ polynomial for polynomial in _CRC_POLYNOMIALS]
    return [
        *(one.to_bytes(_CRC_NBYTES, "little") + rest for one in shifted),
        *(three + base[len(three) :] for three in _EQUAL_ADLER),
    ]


def _with(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + bytes([value]) + data[place + 1 :]


def similar_hashes(rng: random.Random) -> dict[str, list[str]]:
    """Return groups of page hashes that are easily confused, by what they have in common."""
    short, usual, long = (rng.randbytes(count).hex() for count in (16, 32, 64))
    number = f"7{rng.randrange(10**62):062}1"
    return {
        "one is the start of the other": [long[:length] for length in (32, 34, 40, 64, 96, 128)],
        "one is the end of the other": [long[-length:] for length in (32, 34, 40, 64, 96, 128)],
        "zeros in front": ["0" * zeros + short for zeros in (0, 2, 8, 32, 96)],
        "zeros at the end": [short + "0" * zeros for zeros in (0, 2, 8, 32, 96)],
        "one hash repeated": [short * times for times in (1, 2, 3, 4)],
        "decimal digits only": [*_one_digit_changed(number, 9), number[:32], "00" + number],
        "numbers with an exponent": [
            *(f"0e{digit}" + number[3:] for digit in "123"),
            *(f"{number[:7]}e{digit}{'0' * 55}" for digit in "123"),
        ],
        "equal CRC-32": list(_EQUAL_CHECKSUMS),
        **{
            f"equal in 32 bits of {name}": [
                hashlib.sha256(str(number).encode()).hexdigest() for number in numbers
            ]
            for name, numbers in _EQUAL_IN_32_BITS.items()
        },
        "zeros only": ["0" * length for length in (32, 40, 64, 128)],
        "f only": ["f" * length for length in (32, 40, 64, 128)],
        "32 digits, one of them changed": _one_digit_changed(short, 5),
        "128 digits, one of them changed": _one_digit_changed(long, 7),
        "64 digits, one of them changed": _one_digit_changed(usual, 1),
    }


def _one_digit_changed(page_hash: str, step: int) -> list[str]:
    places = sorted({*range(0, len(page_hash), step), len(page_hash) - 1})
    digits = {place: (int(page_hash[place], 16) + 1) % 10 for place in places}
    changed = [
        page_hash[:place] + str(digit) + page_hash[place + 1 :] for place, digit in digits.items()
    ]
    return [page_hash, *changed]


def segmentations(
    nbytes: int, alignment: int, rng: random.Random, most: int = _MOST_SEGMENTS
) -> dict[str, Sequence[int]]:
    """Return lengths of a page's segments, by their description. Cuts are multiples of `alignment`."""
    fibonacci = takewhile(lambda place: place < nbytes, accumulate(_fibonacci(), initial=0))
    places: Mapping[str, Sequence[int]] = {
        "1 segment": (),
        "2 segments": (nbytes // 2,),
        "3 segments, a byte at each end": (1, nbytes - 1),
        "a header of 64 bytes and the rest": (64,),
        "segments that grow": [*fibonacci],
        "16 segments of any length": [rng.randrange(nbytes) for _ in range(15)],
        "129 segments of any length": [rng.randrange(nbytes) for _ in range(128)],
        f"{most} equal segments": [index * nbytes // most for index in range(most)],
    }
    return {description: _lengths(nbytes, alignment, cuts) for description, cuts in places.items()}


def _fibonacci() -> list[int]:
    numbers = [1, 2]
    while numbers[-1] < 1 << 30:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers


def _lengths(nbytes: int, alignment: int, cuts: Sequence[int]) -> list[int]:
    inner = {cut - cut % alignment for cut in cuts}
    bounds = sorted({0, nbytes, *(cut for cut in inner if 0 < cut < nbytes)})
    return [end - start for start, end in pairwise(bounds)]
