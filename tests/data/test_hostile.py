"""Hostile and damaged files of data: each is refused with one sentence that names the file or shows the text."""

import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from lineage.data.sources.boxes import COCO
from lineage.data.sources.lines import SQuAD, read_pairs, read_questions, read_sentences
from lineage.data.transforms.pillow import decode
from tests.data.conftest import png, train


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def header(width, height):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


@pytest.mark.parametrize(
    "content",
    [
        header(100_000, 100_000) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b""),  # DecompressionBomb
        header(64, 64) + chunk(b"IDAT", zlib.compress(bytes(13000), 0)[:5000]) + b"\0\0\0\5\0\0\0\0" * 9,  # SyntaxError
        png(np.zeros((4, 4, 3), np.uint8))[:30],
        b"P6\n4 four\n255\n" + bytes(48),  # ValueError of a PPM file
    ],
)
def test_hostile_images(tmp_path, content):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for file, name in ((path, str(path)), (content, "An example")):
        with pytest.raises(ValueError, match=f"^{name} cannot be read as an image: .+"):
            decode(file, 3)


def test_images_of_other_formats_start_no_program(tmp_path, monkeypatch):
    """Check PostScript, for which Pillow starts Ghostscript, and a pipe, which opens when somebody writes to it."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", None)
    path, page = tmp_path / "a.png", io.BytesIO()
    Image.new("RGB", (8, 8)).save(page, "EPS")
    path.write_bytes(page.getvalue())
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image: cannot identify image file"):
        decode(path, 3)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"a\.png cannot be read as an image: it is not a regular file"):
        decode(path, 3)


def test_coco_with_a_list_for_a_name(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": ["a"]}], "annotations": [], "categories": []}))
    with pytest.raises(ValueError, match=r"a\.json has an image without `id` and `file_name`"):
        COCO(str(path)).images_with_boxes()


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NESTED, "RecursionError"),
        ({"context": 5, "qas": [{"question": "Who?", "answers": []}]}, "a question or context is 5, not text"),
        ({"context": "a", "qas": [{"question": ["Who?"], "answers": []}]}, r"a question or context is \['Who\?'\]"),
        ({"context": 5, "qas": [{"question": "Who?", "answers": [{"text": "a", "answer_start": 0}]}]}, "not text"),
        ({"context": "abc", "qas": [{"question": "Who?", "answers": [{"text": 5, "answer_start": 0}]}]}, "TypeError"),
        ({"context": "abc", "qas": 7}, "TypeError"),
    ],
)
def test_hostile_questions(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content if content is NESTED else json.dumps({"data": [{"paragraphs": [content]}]}))
    with pytest.raises(ValueError, match=f"a.json is not a file in SQuAD's format: .*{message}"):
        read_questions(str(path))
    with pytest.raises(ValueError, match="is not a file in SQuAD's format"):
        SQuAD(str(path)).questions()


@pytest.mark.parametrize(("start", "answer"), [(-3, "bc"), (0, ""), (10**30, "")])
def test_answers_that_are_nowhere(start, answer, tmp_path):
    (path := tmp_path / "a.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "abcd", "qas": [
        {"question": "Who?", "answers": [{"text": answer, "answer_start": start}]}]}]}]}))  # fmt: skip
    with pytest.raises(ValueError, match=rf"a\.json, question 1: .* is not at character {start} of its context"):
        read_questions(str(path))


def test_nested_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"input": "a", "target": "b"}}\n{NESTED}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not a JSON object"):
        read_pairs(str(path))


@pytest.mark.parametrize("id", ["1" * 5000, f"1-{'2' * 5000}"])
def test_long_ids_of_words(tmp_path, id):
    path = tmp_path / "a.conllu"
    path.write_text(f"{id}\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n")
    with pytest.raises(ValueError, match=r"a\.conllu, line 1 begins with '1.*', not with an ID") as raised:
        read_sentences(str(path))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_half_of_a_surrogate_pair(kind):
    with pytest.raises(ValueError, match=r"lone surrogate, .* in 'text \\ud800 more'"):
        train(kind, ["text more"]).encode_batch(["sound", "text \ud800 more"])
