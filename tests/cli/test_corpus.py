"""Which files are read, and which of them are held out."""

import math
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cli.corpus import MAX_BYTES, choose_validation, load_corpus, split_one, unigram_bits_per_byte


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_the_default_is_the_standard_library_without_its_tests() -> None:
    corpus = load_corpus()
    text = corpus.train + corpus.validation
    root = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "json/decoder.py", "lib2to3/pytree.py", "unittest/case.py"):
        if (root / name).exists():
            assert (root / name).read_bytes() in text, name
    for name in ("test/test_argparse.py", "idlelib/idle_test/test_config.py", "lib2to3/tests/test_parser.py"):
        if (root / name).exists():
            assert (root / name).read_bytes() not in text, name
    assert b"class ArgumentParser" in text
    assert 0.05 < len(corpus.validation) / len(text) < 0.2


def test_a_folder_is_split_by_file_and_only_text_is_read(tmp_path: Path) -> None:
    files = {f"part{n}/{n}.txt": f"line {n}\n".encode() * 3 for n in range(40)}
    write(tmp_path, files | {"image.png": b"\x89PNG\xff", "zeros": b"\0" * 20, "empty.txt": b""})
    corpus = load_corpus(tmp_path)
    held_out = choose_validation(files)
    assert corpus.validation == b"".join(files[name] for name in sorted(held_out))
    assert corpus.train == b"".join(files[name] for name in sorted(files.keys() - held_out))
    assert load_corpus(tmp_path) == corpus


def test_the_split_does_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    files = {f"{n}.txt": f"{n}\n".encode() for n in range(30)}
    here, there = load_corpus(write(tmp_path / "here", files)), load_corpus(write(tmp_path / "there", files))
    assert here.fingerprint == there.fingerprint
    assert (here.train, here.validation) == (there.train, there.validation)


def test_the_fingerprint_tells_texts_and_splits_apart(tmp_path: Path) -> None:
    one = load_corpus(write(tmp_path / "one", {"a": b"aa\n", "b": b"bb\n"}))
    other = load_corpus(write(tmp_path / "other", {"a": b"aa\n", "b": b"bc\n"}))
    assert one.fingerprint != other.fingerprint


@given(st.sets(st.text(min_size=1), min_size=2))
def test_neither_side_of_the_split_is_ever_empty(names: set[str]) -> None:
    held_out = choose_validation(names)
    assert held_out
    assert held_out < names


def test_about_a_tenth_of_the_files_is_held_out() -> None:
    names = {f"module_{n}.py" for n in range(2000)}
    assert 150 < len(choose_validation(names)) < 250


@pytest.mark.parametrize(
    ("content", "train", "validation"),
    [
        (b"0123456\n8\nabcdefghij\n", b"0123456\n8\n", b"abcdefghij\n"),  # none after nine tenths: the last before
        (b"0123456789\n" * 9 + b"tail\nend\n", b"0123456789\n" * 9, b"tail\nend\n"),
        (b"0123456789", b"012345678", b"9"),  # no line at all: nine tenths exactly
        (b"0123456789012345678\n", b"012345678901234567", b"8\n"),
    ],
)
def test_one_file_is_split_at_a_line_boundary(content: bytes, train: bytes, validation: bytes) -> None:
    corpus = split_one(content, name="text")
    assert (corpus.train, corpus.validation) == (train, validation)


@given(st.lists(st.sampled_from([b"\n", b"a", b"bb"]), min_size=2).map(b"".join))
def test_one_file_is_split_into_two_parts_that_make_the_whole(content: bytes) -> None:
    corpus = split_one(content, name="text")
    assert corpus.train + corpus.validation == content
    assert corpus.train
    assert corpus.validation


def test_a_folder_with_one_text_is_split_like_a_file(tmp_path: Path) -> None:
    content = b"a line of text\n" * 20
    corpus = load_corpus(write(tmp_path, {"only.txt": content}))
    assert corpus.train == content[: 18 * 15]
    assert corpus.validation == content[18 * 15 :]


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "missing", "no such file or folder: .*missing"),
        ({}, ".", "no text in .*at least one file"),
        ({"a/b.bin": b"\xff\xfe"}, "a", "no text in "),
        ({"nothing.txt": b""}, "nothing.txt", "nothing.txt has 0 bytes: too short"),
        ({"one.txt": b"x"}, "one.txt", "one.txt has 1 bytes: too short"),
    ],
)
def test_nothing_to_read_is_said_in_words(tmp_path: Path, files: dict[str, bytes], path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_corpus(write(tmp_path, files) / path)


def test_unigram_bits_of_a_known_distribution() -> None:
    train = b"a" * 3 + b"b"
    expected = -(math.log2(4 / 260) + math.log2(2 / 260) + math.log2(1 / 260)) / 3
    assert unigram_bits_per_byte(train, b"abc") == pytest.approx(expected, abs=1e-12)


def test_unigram_bits_of_uniform_bytes_are_eight() -> None:
    everything = bytes(range(256))
    assert unigram_bits_per_byte(everything * 5, everything) == pytest.approx(8.0, abs=1e-12)


def test_a_few_files_of_very_different_length_are_split_as_one_text(tmp_path: Path) -> None:
    """Else one that has next to nothing, or all the rest, might be what is held out."""
    long, short = b"a line of text\n" * 1000, b"tiny\n"
    for names in (("a", "b"), ("b", "a")):
        corpus = load_corpus(write(tmp_path / names[0], {names[0]: long, names[1]: short}))
        assert len(corpus.validation) == pytest.approx(0.1 * len(long + short), abs=20)
        assert sorted((corpus.train + corpus.validation).splitlines()) == sorted((long + short).splitlines())


def test_more_text_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder/one"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(MAX_BYTES + 1)  # takes no room on the disk
    for name in ("file", "folder"):
        with pytest.raises(ValueError, match=f"has {MAX_BYTES + 1} bytes, at most {MAX_BYTES} will do"):
            load_corpus(tmp_path / name)


def test_what_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="/dev/zero is no file that every rank could read for itself"):
        load_corpus(Path("/dev/zero"))
