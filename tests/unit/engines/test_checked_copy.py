"""The copy that computes a checksum on its way: the same bytes and the same checksum as two passes."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from engines.checked_copy import Bytes, CopiesOf, one_pass, two_passes
from engines.checked_copy.build import build

AROUND = 64  # bytes beside the target that must stay as they are


@pytest.fixture(scope="module", params=["one pass", "two passes"])
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CopiesOf:
    """Both ways; the compiled one built here, so that it is tested as it stands in the tree."""
    if request.param == "two passes":
        return two_passes
    library = tmp_path_factory.mktemp("library") / "checked_copy.so"
    why_not = build(library)
    if why_not:
        pytest.skip(why_not)
    compiled = one_pass(library)
    if compiled is None:
        pytest.skip("this processor has no AVX2")
    return compiled


def copy(copies: CopiesOf, target: Bytes, source: Bytes) -> int:
    """One block, into the memory that is its target: its checksum."""
    (checksum,) = copies(target, [0], [source])
    return checksum


def noise(length: int) -> Bytes:
    """Bytes that repeat nothing."""
    return np.random.default_rng(length).integers(0, 256, length, np.uint8)


@pytest.mark.parametrize(
    "length", [0, 1, 240, *range(241, 322), *range(1020, 1092), 2048, 2049, 65_535, 65_536, 1 << 20, (1 << 20) + 77]
)
def test_bytes_and_checksum_are_right_at_every_length_and_place(copies: CopiesOf, length: int) -> None:
    """Short ones, whole and broken stripes (64) and blocks (1,024) of the hash; targets and sources at any address."""
    source = noise(length + 32)
    for shift_to, shift_from in ((0, 0), (1, 0), (0, 3), (8, 31), (32, 32)):
        taken = source[shift_from : shift_from + length]
        memory = np.full(length + 2 * AROUND + 32, 0xA5, np.uint8)
        target = memory[AROUND + shift_to : AROUND + shift_to + length]
        assert copy(copies, target, taken) == xxhash.xxh3_64_intdigest(taken.tobytes())
        assert target.tobytes() == taken.tobytes()
        assert set(memory[: AROUND + shift_to]) | set(memory[AROUND + shift_to + length :]) == {0xA5}


def test_one_bit_makes_another_checksum(copies: CopiesOf) -> None:
    """Wherever it is: in the first block, in the middle, in the last stripe."""
    source, target = noise(100_000), np.zeros(100_000, np.uint8)
    right = copy(copies, target, source)
    for place in (0, 63, 1_024, 50_000, 99_935, 99_936, 99_999):
        source[place] ^= 1
        assert copy(copies, target, source) != right
        source[place] ^= 1


def test_bytes_that_do_not_lie_together_are_copied_too(copies: CopiesOf) -> None:
    """Every second byte of an array, and into every second one."""
    source, target = noise(4_000), np.zeros(4_000, np.uint8)
    assert copy(copies, target[::2], source[::2]) == xxhash.xxh3_64_intdigest(source[::2].tobytes())
    assert target[::2].tobytes() == source[::2].tobytes()
    assert not target[1::2].any()


def test_what_does_not_fit_or_may_not_be_written_is_refused(copies: CopiesOf) -> None:
    """Instead of writing past the end, or into what others were promised not to change."""
    with pytest.raises(ValueError):
        copy(copies, np.zeros(1_000, np.uint8), noise(1_001))
    sealed = np.zeros(1_000, np.uint8)
    sealed.flags.writeable = False
    with pytest.raises(ValueError):
        copy(copies, sealed, noise(1_000))


@pytest.mark.parametrize("length", [100, 4_000, 65_536])
def test_many_blocks_go_in_and_out_in_one_call(copies: CopiesOf, length: int) -> None:
    """Each to its own offset, in any order, with its own checksum; what lies between them stays as it is."""
    blocks = [noise(length + number)[:length] for number in range(5)]
    offsets = [(number * 3 % 5) * (length + 32) for number in range(5)]
    memory = np.full(5 * (length + 32), 0xA5, np.uint8)
    right = [xxhash.xxh3_64_intdigest(block.tobytes()) for block in blocks]
    assert copies(memory, offsets, blocks) == right
    out = [np.zeros(length, np.uint8) for _ in range(5)]
    assert copies(memory, offsets, out, outward=True) == right
    assert [block.tobytes() for block in out] == [block.tobytes() for block in blocks]
    assert set(memory.reshape(5, length + 32)[:, length:].ravel()) == {0xA5}


def test_of_many_blocks_none_is_copied_if_one_does_not_fit(copies: CopiesOf) -> None:
    """Outside of the memory at either end, of another length, too few places, or sealed where it should be written."""
    memory, block = np.zeros(10_000, np.uint8), noise(1_000)
    sealed = np.zeros(1_000, np.uint8)
    sealed.flags.writeable = False
    for offsets, blocks in (
        ([0, 9_001], [block] * 2),
        ([0, -1], [block] * 2),
        ([0, 0], [block, noise(999)]),
        ([0], []),
    ):
        with pytest.raises(ValueError):
            copies(memory, offsets, blocks)
        with pytest.raises(ValueError):
            copies(memory, offsets, blocks, outward=True)
    with pytest.raises(ValueError):
        copies(memory, [0, 1_000], [block.copy(), sealed], outward=True)
    assert not memory.any()
    assert copies(memory, [], []) == []


def test_a_library_that_is_not_there_or_is_none_is_left_alone(tmp_path: Path) -> None:
    """An installation without a compiler, or a file of another machine."""
    broken = tmp_path / "checked_copy.so"
    assert one_pass(broken) is None
    broken.write_bytes(b"not a library")
    assert one_pass(broken) is None


def test_without_a_compiler_nothing_is_built_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is told instead."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(tmp_path / "checked_copy.so") == "no C compiler"
    assert list(tmp_path.iterdir()) == []
