"""Reading prompt files: what is read, and the one line for what cannot be."""

import io
import sys

import pytest

from beaconscope.errors import BeaconScopeError
from beaconscope.record.prompts import Prompt, read_prompts, read_text


@pytest.fixture
def write(tmp_path):
    def write(data: bytes) -> str:
        path = tmp_path / "file.txt"
        path.write_bytes(data)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"How many?", "How many?"),
        (b"How many?\n", "How many?"),
        (b"How many?\r\n", "How many?"),
        (b"How many?\n\n", "How many?\n"),
        (b"\xef\xbb\xbfHow many?", "How many?"),
        ("≥ 3 €\n".encode(), "≥ 3 €"),
        (b"  two\n  lines", "  two\n  lines"),
    ],
)
def test_a_text_is_read_less_its_last_line_break(write, data, text):
    assert read_text(write(data), "prompt") == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x89PNG\r\n\x00\x00", "is binary"),
        (b"caf\xe9", r"is not UTF-8 \(byte 3\)"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(write, data, says):
    with pytest.raises(BeaconScopeError, match=says) as caught:
        read_text(write(data), "prompt")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(BeaconScopeError, match=r"the prompt file .*none\.txt does not exist"):
        read_text(str(tmp_path / "none.txt"), "prompt")
    with pytest.raises(BeaconScopeError, match="is a folder"):
        read_text(str(tmp_path), "prompt")


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    assert read_text("-", "prompt") == "from a pipe"


def test_many_prompts_are_read_in_order(write):
    source = write(
        b'{"id": "a", "prompt": "one"}\n'
        b"\n"
        b'{"id": 7, "prompt": "two", "completion": "so", "answer": 12, "level": "hard"}\n'
    )
    assert read_prompts(source) == (Prompt("a", "one"), Prompt("7", "two", "so", "12"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: no object"),
        ('{"prompt": "x"}', "line 2: no 'id'"),
        ('{"id": "b"}', "line 2: no 'prompt'"),
        ('{"id": "b", "prompt": ""}', "line 2: 'prompt' is no text"),
        ('{"id": "b", "prompt": 3}', "line 2: 'prompt' is no text"),
        ('{"id": "../b", "prompt": "x"}', "cannot name a file"),
        ('{"id": ".b", "prompt": "x"}', "cannot name a file"),
        ('{"id": "A", "prompt": "x"}', "is that of line 1"),
        ('{"id": "b", "prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(write, line, says):
    source = write(b'{"id": "a", "prompt": "one"}\n' + line.encode())
    with pytest.raises(BeaconScopeError, match=says):
        read_prompts(source)
