"""From tokens to text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.serve import TextStream


def decode(ids):
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=30))
def test_bytes_become_whole_characters(text):
    stream = TextStream(decode)
    pieces = [stream.push(i) for i in text.encode()] + [stream.finish()]
    # The sign for a broken character cannot be told from one at the very end.
    assert "".join(pieces) == text.rstrip("\ufffd")
    for piece in pieces:
        piece.encode()


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes(ids):
    stream = TextStream(decode)
    text = "".join(stream.push(i) for i in ids) + stream.finish()
    assert text == decode(ids).rstrip("\ufffd")


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("hello END more", ("END",), "hello "),
        ("hello EN", ("END",), "hello EN"),
        ("aab", ("ab",), "a"),
        ("one two", ("two", "one t"), ""),
        ("ENENDx", ("END",), "EN"),
        ("nothing", (), "nothing"),
        ("grüße", ("ß",), "grü"),
    ],
)
def test_stop_texts(text, stop, want):
    stream, told = TextStream(decode, stop), ""
    for i in text.encode():
        told += stream.push(i)
        # What was told is never taken back, and holds nothing that may yet be the beginning of an end.
        assert want.startswith(told)
        if stream.stopped:
            break
    assert told + stream.finish() == want
    assert stream.stopped == any(s in text for s in stop)


def test_a_space_between_prompt_and_answer():
    pieces = {0: "▁the", 1: "▁dog", 2: "▁was"}

    def words(ids):
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(words, prompt=(0, 1))
    assert stream.push(2) + stream.finish() == " was"
