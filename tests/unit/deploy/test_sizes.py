"""Byte sizes as people write them."""

import pytest

from deploy.local.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("65536", 65_536),
        ("160MiB", 160 * 1024 * 1024),
        ("1.5 GiB", 1_610_612_736),
        ("2GB", 2_000_000_000),
        ("8k", 8192),
    ],
)
def test_sizes_are_read_with_and_without_units(text: str, count: int) -> None:
    """Binary units are powers of 1024, decimal ones of 1000."""
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "10 apples", "-5MiB", "0x10"])
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    """The message says what may be written."""
    with pytest.raises(ValueError, match="MiB"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_largest_unit_that_fits() -> None:
    """1,536 bytes are 1.5 KiB; whole numbers have no fraction."""
    assert [show_bytes(count) for count in (512, 1536, 160 * 2**20, 3 * 2**30)] == [
        "512 B",
        "1.5 KiB",
        "160 MiB",
        "3 GiB",
    ]
