"""Files of the command `score`: references, outputs, and errors in them."""

import bz2
import json
import lzma
import os

import numpy as np
import pytest

from lineage import launch
from lineage.evaluation import records
from lineage.evaluation.score import score_files, write_scores
from tests.evaluation.test_score import IMAGES, squad

CROWD = {"image_id": 7, "category_id": 4, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": "no"}


FOUND = {"image_id": 7, "category_id": 4, "bbox": [1, 2, 3, 4], "score": 0.5}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("metric=blue predictions=P", "--metric is 'blue': it must be one of bleu, chrf, ter, d2l_bleu"),
        ("predictions=P", "--metric is missing: it must be one of bleu, chrf, ter, d2l_bleu, rouge,"),
        ("metric=bleu", "--predictions is missing: give the file to score."),
        ("metric=bleu predictions=P", "bleu needs references: give --references."),
        ("metric=distinct predictions=P references=P", "distinct has no references: omit --references."),
        ("metric=ter predictions=no references=P", "There is no file no"),
        ("metric=ter predictions=P references=R", "P has 2 texts and R 1: they must be equal."),
        ("metric=ter predictions=E references=R", "E is empty: there is nothing to score."),
        ("metric=d2l_bleu predictions=P references=P option=n=2", "d2l_bleu has no option 'n': it has order."),
        ("metric=d2l_bleu predictions=P references=P option=order=x", "the option order of d2l_bleu is 'x': it must"),
        ("metric=bleu predictions=P references=P option=lowercase=yes", "the option lowercase of bleu is 'yes': it"),
        ("metric=d2l_bleu predictions=P references=P references=P", "['b', 'b'] is not a single text: each"),
        ("metric=ter predictions=J.jsonl references=P", "J.jsonl, entry 2 must be a text or texts, or"),
        ("metric=ter predictions=K.jsonl references=P", "K.jsonl, line 1 is not JSON: Expecting"),
        ("metric=coco predictions=C.json references=C.json", "the files are not in the formats of COCO"),
        ("metric=ter predictions=D.json references=P", "D.json has a JSON object: it must be a list of texts."),
        ("metric=squad predictions=P references=Q.json", "Q.json has a JSON object: it must be a list of texts, or"),
        ("metric=squad predictions=D.json references=D.json", "the references are not in the format of SQuAD:"),
        ("metric=squad predictions=D.json references=Q.json", "1 of 2 questions have no prediction"),
        ("metric=tagging predictions=P references=P references=P", "there are 2 files of references: this met"),
        ("metric=coco predictions=C.json references=C.json references=C.json", "there are 2 files of references"),
        ("metric=bert_score predictions=P references=P", "the option model is missing: give the folder"),
        ("metric=rouge predictions=P references=P option=samples=0", "samples is 0: it must be at"),
        ("metric=rouge predictions=P references=P option=confidence=95", "confidence is 95.0: it must be between 0"),
        ("metric=ter predictions=P references=P option=baseline=R", "R has 1 texts and the predictions 2: they must"),
        ("metric=ter predictions=P references=P option=samples=1", "samples is 1: it must be 0 or at least 2."),
        ("metric=chrf predictions=P references=P option=samples=-5", "samples is -5: it must be 0 or at least 2."),
        ("metric=bleu predictions=P references=P option=test=ar", "test is 'ar', which compares with a baseline:"),
        ("metric=bleu predictions=P references=P option=smooth_value=2", "smooth_value is 2, which has no effect"),
        ("metric=tagging predictions=P references=T", "The tag 'b' is not valid in the scheme CoNLL"),
        ("metric=tagging predictions=P references=B", "Sentence 1 has 1 predicted and 2 true tags."),
        ("metric=regression predictions=P references=T", "The values must be numbers: could not"),
        ("metric=rouge predictions=P references=P option=tokenize=x", "tokenize is 'x', stem False: it"),
    ],
)
def test_invalid_files_raise(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"P": "b\nc\n", "R": "a\n", "E": "", "J.jsonl": '"a"\n{"x": 1}\n', "K.jsonl": "a\nb\n", "C.json": "[1]"}
    files |= {"T": "O\nB-X\n", "B": "O\nB-X O\n"}
    files |= {"D.json": '{"a": "b", "c": "d"}', "Q.json": json.dumps(squad({"a": ["b"], "q": []}))}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert launch.main(["score", *(f"--{argument}" for argument in arguments.split())]) == 1
    assert capsys.readouterr().err.splitlines()[1].startswith(f"error: {sentence}")
    assert {path.name for path in tmp_path.iterdir()} == {*files}


def test_output_is_a_file_or_a_link_to_one(tmp_path):
    """Check that a pipe, a folder and a link are not replaced: as root, /dev/null would be."""
    for name in ("texts", "other"):
        (tmp_path / name).write_text("a b\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("new/scores.json")
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match=f"--output is {tmp_path / name}, which is not a file: choose another"):
            write_scores(f"{tmp_path}/{name}", "bleu", f"{tmp_path}/texts", [f"{tmp_path}/other"])
    assert (tmp_path / "pipe").is_fifo()
    write_scores(f"{tmp_path}/link", "bleu", f"{tmp_path}/texts", [f"{tmp_path}/other"])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "new" / "scores.json").read_text())["metric"] == "bleu"


@pytest.mark.parametrize("output", ["texts/scores.json", "texts/more/scores.json", "x" * 300, "new\0.json"])
def test_output_that_cannot_be_created(output, tmp_path, capsys):
    (texts := tmp_path / "texts").write_text("a b\n")
    arguments = ["score", "--metric=distinct", f"--predictions={texts}", f"--output={tmp_path}/{output}"]
    assert launch.main(arguments) == 1
    message = capsys.readouterr().err.splitlines()[1]
    assert message.startswith("error: --output ")
    assert message.endswith(": choose another one.")
    assert "Errno" not in message


def test_output_folder_is_created(tmp_path):
    (texts := tmp_path / "texts").write_text("a b\n")
    output = tmp_path / "new" / "folder" / "scores.json"
    assert launch.main(["score", "--metric=distinct", f"--predictions={texts}", f"--output={output}"]) == 0
    assert json.loads(output.read_text())["metric"] == "distinct"


def test_references_in_tables_and_folders(tmp_path):
    """Check labels in a .csv and a .tsv, and those of images, which are the names of their folders."""
    predictions = tmp_path / "out.jsonl"
    predictions.write_text("".join(json.dumps({"label": label}) + "\n" for label in ("a", "b", "b")))
    (tmp_path / "true.csv").write_text('text,label\n"x, y",a\nz,b\nz,a\n')
    (tmp_path / "true.tsv").write_text("label\ttext\na\tx\nb\ty\nb\tz\n")
    for name in ("a/1.png", "b/1.png", "b/2.JPG", "b/notes.txt"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).touch()
    for name, accuracy in (("true.csv", 2 / 3), ("true.tsv", 1), ("images", 1)):
        actual = score_files("accuracy", str(predictions), [str(tmp_path / name)], [])
        assert actual["scores"]["accuracy"] == pytest.approx(accuracy)
        assert len(actual["files"]) == 2
    (tmp_path / "lines.jsonl").write_text('{"label": "a"}\n\n{"label": "b"}\n{"label": "b"}\n\n')
    assert score_files("accuracy", str(predictions), [f"{tmp_path}/lines.jsonl"], [])["scores"]["accuracy"] == 1
    (tmp_path / "tags.jsonl").write_text('{"tags": ["B-PER", "O"]}\n{"tags": ["O"]}\n')
    (tmp_path / "eng.testb").write_text("-DOCSTART- X O\n\nAda NNP B-PER\nruns VBZ O\n\nBonn NNP B-LOC\n")
    actual = score_files("tagging", str(tmp_path / "tags.jsonl"), [f"bio:{tmp_path}/eng.testb"], [])
    assert (actual["scores"]["precision"], actual["scores"]["recall"]) == (1, 0.5)
    with pytest.raises(ValueError, match="testb, which is one of the files to score"):
        write_scores(f"{tmp_path}/eng.testb", "tagging", f"{tmp_path}/tags.jsonl", [f"bio:{tmp_path}/eng.testb"])
    (tmp_path / "true.csv").write_text('label\na\n""\n" "\n')
    with pytest.raises(ValueError, match="2 references have no label, the first one in entry 2: remove these rows"):
        score_files("accuracy", str(predictions), [str(tmp_path / "true.csv")], [])
    (tmp_path / "true.csv").write_text("review,stars\nx,1\n")
    with pytest.raises(ValueError, match=r"true\.csv must be a table with a header that has the column label"):
        score_files("accuracy", str(predictions), [str(tmp_path / "true.csv")], [])


def test_images_in_subfolders_have_the_class_of_the_outer_folder(tmp_path):
    """Check that the labels are those of the source `folder`, which leaves out hidden folders."""
    for name in ("test/cat/x/1.png", "test/cat/.checkpoints/1.png", "test/dog/y/2.png", ".trash/3.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (out := tmp_path / "out.jsonl").write_text('{"file": "cat/x/1.png", "label": "cat"}\n{"label": "dog"}\n')
    assert score_files("accuracy", str(out), [str(tmp_path / "test")], [])["scores"]["accuracy"] == 1
    (tmp_path / "val" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "cat" / "1.png").touch()
    with pytest.raises(ValueError, match="has the folders of splits, such as test: name the folder of one split"):
        score_files("accuracy", str(out), [str(tmp_path)], [])
    out.write_text('{"label": "cat"}\n')
    assert score_files("accuracy", str(out), [str(tmp_path / "test" / "cat")], [])["scores"]["accuracy"] == 0
    (tmp_path / "test" / "cat" / "x" / "1.png").rename(tmp_path / "test" / "cat" / "1.png")
    assert score_files("accuracy", str(out), [str(tmp_path / "test" / "cat")], [])["scores"]["accuracy"] == 1


def test_references_are_read_as_the_data_of_the_run(tmp_path):
    """Check quotes without meaning, and a column of tags that is not the last one, after `lineage predict`."""
    predictions, beside = tmp_path / "out.json", tmp_path / "out.jsonl.about.json"
    (table := tmp_path / "true.tsv").write_text('text\tlabel\n"x\ta\ny"\tb\n')
    predictions.write_text('["a", "b"]')
    with pytest.raises(ValueError, match=r"true\.tsv, line 3 is joined to the line before by double quotes"):
        score_files("accuracy", str(predictions), [str(table)], [])
    beside.write_text(json.dumps({"config.source.quotes": False}))
    assert score_files("accuracy", str(predictions), [str(table)], [])["scores"]["accuracy"] == 1
    (tags := tmp_path / "eng.testb").write_text("Ada B-PER NNP\nruns O VBZ\n")
    predictions.write_text('[["B-PER", "O"]]')
    beside.write_text(json.dumps({"config.source.word_column": 0, "config.source.tag_column": 1}))
    assert score_files("tagging", str(predictions), [f"bio:{tags}"], [])["scores"]["f1"] == 1


def test_references_have_the_columns_of_the_run(tmp_path):
    """Check columns of labels and targets with other names beside one of texts, which are inputs and not labels."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "true.csv").write_text("text,sentiment\nx,a\ny,b\n")
    (tmp_path / "true.jsonl").write_text('{"text": "x", "sentiment": "a"}\n{"text": "y", "sentiment": "b"}\n')

    def scores(metric, predictions, file, **options):
        out.write_text("".join(json.dumps({"prediction": text}) + "\n" for text in predictions))
        about = {f"config.source.{name}": value for name, value in options.items()}
        (tmp_path / "out.jsonl.about.json").write_text(json.dumps(about))
        return score_files(metric, str(out), [str(tmp_path / file)], [])["scores"]

    for file in ("true.csv", "true.jsonl"):
        assert scores("accuracy", "ab", file, label_key="sentiment")["accuracy"] == 1
        assert scores("d2l_bleu", "ab", file, target_key="sentiment", label_key="text")["d2l_bleu"] == 1
        assert scores("d2l_bleu", "xy", file, target_key="target")["d2l_bleu"] == 1
        for metric in ("accuracy", "regression"):
            with pytest.raises(ValueError, match=r"true.* label or references or reference\."):
                scores(metric, "12", file)
    (tmp_path / "true.csv").write_text("label,other\na,b\n")
    assert scores("accuracy", "b", "true.csv", label_key="other")["accuracy"] == 1
    assert scores("accuracy", "a", "true.csv", label_key="missing")["accuracy"] == 1


def test_predictions_that_are_errors_are_left_out(tmp_path):
    """Check that images which `predict --skip-bad=N` left out are counted and that the others keep their references."""
    path = tmp_path / "out.jsonl"

    def scores(*rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "true.txt").write_text("a\nb\nb\n")
        return score_files("accuracy", str(path), [str(tmp_path / "true.txt")], [])["scores"]

    bad = {"file": "2.png", "error": "Image 1: it cannot be read."}
    actual = scores({"file": "1.png", "label": "a"}, bad, {"label": "a", "error": 0.1})
    assert (actual["accuracy"], actual["errors"]) == (0.5, 1)
    assert "errors" not in scores({"label": "a"}, {"label": "a"}, {"label": "a"})
    with pytest.raises(ValueError, match=r"out\.jsonl has errors only: there is nothing to score"):
        scores(bad, bad, bad)
    assert records.pictures(str(path), errors=True) == [None] * 3
    with pytest.raises(ValueError, match=r"out\.jsonl, entry 1 must be a text"):
        records.read(str(path), ["label"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "label,text\na, b,c\n", "a.csv, line 2 has 3 columns: the header has 2"),
        ("a.csv", "label\na\rb\n", "a.csv, line 2 cannot be read: new-line character"),
        ("a.csv", 'label\n"a\n', "a.csv, line 2 cannot be read: unexpected end of data"),
        ("a.csv", "label,label\na,b\n", "a.csv has the column 'label' twice"),
        ("a.json", "null", "a.json must have a list or an object, not None"),
        ("a.json", '"abc"', "a.json must have a list or an object, not abc"),
        ("a.json", "[" * 100_000, "a.json is not JSON: maximum recursion depth"),
    ],
)
def test_damaged_files(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    (tmp_path / "out.txt").write_text("a\n")
    with pytest.raises(ValueError, match=message):
        score_files("accuracy", str(tmp_path / "out.txt"), [str(tmp_path / name)], [])


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "message"),
    [
        ("squad", {"1": 5}, {"1": "a"}, "5 is not a single text"),
        ("squad", {"1": None}, {"1": "a"}, "None is not a single text"),
        ("squad", {"1": "a"}, {"1": 5}, "the references are not in the format of SQuAD: TypeError"),
        ("coco", [], IMAGES | {"annotations": [CROWD]}, "the files are not in the formats of COCO: KeyError 'no'"),
        ("coco", [FOUND | {"category_id": 8}], IMAGES | {"annotations": []}, "category_id is 8, which the references"),
        ("voc", [FOUND | {"image_id": 8}], IMAGES | {"annotations": []}, "image_id is 8, which the references do not"),
        ("voc", [], IMAGES | {"annotations": [CROWD]}, "the files are not in the formats of COCO: KeyError 'no'"),
        ("coco", ["a"], IMAGES | {"annotations": []}, "the files are not in the formats of COCO: AttributeError"),
        (
            "coco",
            [],
            IMAGES | {"images": [{"id": 7}, {"id": "a"}], "annotations": []},
            "the files are not in .*: TypeE",
        ),
        ("coco", {"a": 1}, IMAGES | {"annotations": []}, "the files are not in the formats of COCO: AttributeError"),
        ("coco", [FOUND | {"bbox": {"a": 1}}], IMAGES | {"annotations": []}, "the files are not in .*: ValueError"),
        ("voc", [FOUND | {"bbox": [1, 2, 3]}], IMAGES | {"annotations": []}, "the files are not in .*: ValueError"),
        ("coco", [FOUND | {"score": 10**400}], IMAGES | {"annotations": []}, "the files are not in .*: OverflowError"),
        ("coco", [FOUND | {"score": None}], IMAGES | {"annotations": []}, "the files are not in .*: TypeError"),
        ("coco", [], IMAGES | {"annotations": [CROWD | {"iscrowd": 0, "area": None}]}, "the files are not in .*: Type"),
        ("coco", [], IMAGES | {"annotations": [CROWD | {"iscrowd": 0, "area": np.nan}]}, "Image 7: an area is not fin"),
        ("regression", ["nan", "1"], ["1", "2"], "The values must be finite: one is nan"),
        ("regression", ["1e400", "1"], ["1", "2"], "The values must be finite: one is inf"),
        ("regression", ["1", "2"], ["1", "1e39"], r"The values must be finite: one is 1e\+39"),
        ("fill_mask", ["a"], ["a"], "Text 1 is not a prediction with `masks`"),
        ("fill_mask", [{"masks": [[{"token": 5}]]}], ["a"], "Text 1 is not a prediction with `masks`"),
        ("fill_mask", [{"masks": [[{"token": "a"}]]}], [["a"]], "Text 1 is not a prediction with `masks`"),
        ("fill_mask", [{"masks": []}], ["a b"], "Text 1 has 0 masks and 2 hidden tokens"),
        ("fill_mask", [{"masks": [[]]}], ["a"], "The predictions have no masks"),
    ],
)
def test_entries_of_other_types(metric, predictions, references, message, tmp_path):
    if metric == "squad":
        asked = [{"id": id, "answers": [{"text": text}]} for id, text in references.items()]
        references = {"data": [{"paragraphs": [{"qas": asked}]}]}
    (tmp_path / "out.json").write_text(json.dumps(predictions))
    (tmp_path / "true.json").write_text(json.dumps(references))
    with pytest.raises(ValueError, match=message):
        score_files(metric, str(tmp_path / "out.json"), [str(tmp_path / "true.json")], [])


def test_multiline_cells_and_entries_that_name_no_image(tmp_path):
    (tmp_path / "a.csv").write_text('prediction\n"a\nb"\n')
    assert records.read(str(tmp_path / "a.csv"), ["text", "prediction"]) == ["a\nb"]
    (tmp_path / "a.jsonl").write_text('["a.png"]\n')
    with pytest.raises(ValueError, match=r"a\.jsonl has \['a.png'\]: each entry must be the name of one image"):
        records.pictures(str(tmp_path / "a.jsonl"))


def test_files_to_score_are_not_overwritten(tmp_path, capsys):
    (texts := tmp_path / "a.txt").write_text("a b\n")
    (link := tmp_path / "link.txt").symlink_to(texts)
    for output in (texts, link):
        assert launch.main(["score", "--metric=distinct", f"--predictions={texts}", f"--output={output}"]) == 1
        assert f"--output is {output}, which is one of the files to score" in capsys.readouterr().err
    assert texts.read_text() == "a b\n"


@pytest.mark.parametrize("name", ["out.jsonl.bz2", "out.jsonl.xz", "out.JSONL"])
def test_format_of_a_file_does_not_depend_on_its_compression(name, tmp_path):
    """Check that lines of JSON are not scored as texts."""
    content = b'{"prediction": "a b"}\n{"prediction": "c d"}\n'
    content = {".bz2": bz2.compress, ".xz": lzma.compress}.get(name[-4:].lstrip("l"), bytes)(content)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "true.txt").write_text("a b\nc d\n")
    assert score_files("d2l_bleu", str(tmp_path / name), [str(tmp_path / "true.txt")], [])["scores"]["d2l_bleu"] == 1


def test_predictions_of_other_images_are_refused(tmp_path):
    """Check that the images of predictions are those of the references, also if their number is the same."""
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        (tmp_path / "images" / name).touch()
    out = tmp_path / "out.jsonl"
    for files, right in ((("a/1.png", "b/2.png"), True), (("1.png", "x/b/2.png"), True), (("2.png", "1.png"), False)):
        out.write_text("".join(json.dumps({"file": file, "label": "a"}) + "\n" for file in files))
        if right:
            assert score_files("accuracy", str(out), [str(tmp_path / "images")], [])["scores"]["accuracy"] == 0.5
        else:
            with pytest.raises(ValueError, match=r"Entry \d is .*: predictions and references must be of the same ima"):
                score_files("accuracy", str(out), [str(tmp_path / "images")], [])


@pytest.mark.parametrize(
    ("metric", "lines", "message"),
    [
        ("squad", [{"id": 1, "text": "a"}, {"id": "2", "text": "b"}], "Entry 1 has the id '2' in .* and '1' in"),
        ("tagging", [{"words": ["x"], "tags": ["O"]}, {"words": ["y"], "tags": ["B-A"]}], "Entry 1 has the words 'y'"),
    ],
)
def test_predictions_in_another_order_are_refused(metric, lines, message, tmp_path):
    out, true = tmp_path / "out.jsonl", tmp_path / "true.jsonl"
    true.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out.write_text("".join(json.dumps(line | {"id": 7}) + "\n" for line in lines))  # other ids may be numbers
    assert score_files(metric, str(out), [str(true)], [])["scores"]
    out.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    with pytest.raises(ValueError, match=f"{message}.*: predictions and references must be in the same order"):
        score_files(metric, str(out), [str(true)], [])
    if metric == "tagging":
        true = tmp_path / "true.txt"
        true.write_text("".join(f"{line['words'][0]} {line['tags'][0]}\n\n" for line in lines))
        with pytest.raises(ValueError, match=message):
            score_files(metric, str(out), [f"bio:{true}"], [])


def test_ids_and_names_that_occur_twice(tmp_path):
    def score(metric, predictions, references):
        (tmp_path / "out.json").write_text(predictions)
        (tmp_path / "true.json").write_text(json.dumps(references))
        return score_files(metric, str(tmp_path / "out.json"), [str(tmp_path / "true.json")], [])["scores"]

    truth = squad({"x": ["a"], "y": ["b"]})
    with pytest.raises(ValueError, match=r"out\.json is not JSON: the key 'x' occurs twice in an object"):
        score("squad", '{"x": "a", "y": "b", "x": "b"}', truth)
    truth["data"][0]["paragraphs"][1]["qas"][0]["id"] = "x"
    with pytest.raises(ValueError, match="the references have 2 questions with 1 ids: each needs its own"):
        score("squad", '{"x": "a"}', truth)
    truth["data"][0]["paragraphs"][1]["qas"][0]["id"] = 5  # as a number
    assert score("squad", '{"x": "a", "5": "b"}', truth)["exact_match"] == 1
    same = [{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}]
    with pytest.raises(ValueError, match="references has categories with the same `id` or `name`"):
        score("coco", "[]", {"images": [], "annotations": [], "categories": same})


def test_empty_files_and_folders_are_refused(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "a.conllu").write_text("")
    for metric, name in (("accuracy", "images"), ("tagging", "a.conllu")):
        with pytest.raises(ValueError, match=f"{name} is empty: there is nothing to score"):
            score_files(metric, str(tmp_path / name), [str(tmp_path / name)], [])
    (tmp_path / "a.txt").write_text("\n\n")  # sentences without words
    assert score_files("tagging", f"{tmp_path}/a.txt", [f"{tmp_path}/a.txt"], [])["scores"]["accuracy"] is None


def test_references_without_questions_and_long_values_are_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"1": "a"}')
    (tmp_path / "r.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match="the references have no questions"):
        score_files("squad", str(tmp_path / "p.json"), [str(tmp_path / "r.json")], [])
    (tmp_path / "a.txt").write_text("x" * 10_000)
    with pytest.raises(ValueError, match="The values must be numbers") as error:
        score_files("regression", str(tmp_path / "a.txt"), [str(tmp_path / "a.txt")], [])
    assert len(str(error.value)) < 200
