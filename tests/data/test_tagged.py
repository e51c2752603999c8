"""Tagged words: CoNLL-U files, and tags aligned with the first token of each word."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.data import TaggedSentence
from lineage.data.examples import encoded
from lineage.data.sources.lines import BIO, CoNLLU, read_sentences
from lineage.tasks.masked_lm import MaskedLM
from lineage.tasks.token_classification import TokenClassification, encode
from tests.data.conftest import load, train

CONLLU = """\
# text = I don't vámonos (al mar).
1\tI\tI\tPRON\t_\t_\t2\tx\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\t_\t_\t0\tx\t_\t_
3\tn't\tnot\tPART\t_\t_\t2\tx\t_\t_
4\tvámonos\tx\tVERB\t_\t_\t2\tx\t_\t_
4.1\tempty\tx\tVERB\t_\t_\t_\t_\t2:x\t_
5\t(\t(\tPUNCT\t_\t_\t2\tx\t_\tSpaceAfter=No
6-7\tal\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
6\ta\ta\tADP\t_\t_\t2\tx\t_\t_
7\tel\tel\tDET\t_\t_\t2\tx\t_\t_
8\t.\t.\tPUNCT\t_\t_\t2\tx\t_\tA=b|SpaceAfter=No

1\tYes\tyes\tINTJ\t_\t_\t0\tx\t_\t_
"""


def test_conllu(tmp_path):
    (tmp_path / "a.conllu").write_text(CONLLU)
    first, second = read_sentences(f"{tmp_path}/a.conllu")
    assert first.words == ["I", " do", "n't", " vámonos", " (", "a", "el", "."]
    assert first.tags == ["PRON", "AUX", "PART", "VERB", "PUNCT", "ADP", "DET", "PUNCT"]
    assert second == TaggedSentence(["Yes"], ["INTJ"])
    (tmp_path / "b.conllu").write_text("1\ta\n")
    with pytest.raises(ValueError, match=r"b.conllu, line 1 has 2 columns: CoNLL-U has 10"):
        read_sentences(f"{tmp_path}/b.conllu")
    (tmp_path / "c.conllu").write_text(CONLLU.replace("1\tYes", "one\tYes"))
    with pytest.raises(ValueError, match=r"c.conllu, line \d+ begins with 'one', not with an ID such as 1 or 1-2"):
        read_sentences(f"{tmp_path}/c.conllu")
    (tmp_path / "d.conllu").write_text(CONLLU.replace("\n\n", "\n"))
    with pytest.raises(ValueError, match=r"d.conllu, line \d+ has the ID 1 after \d: IDs must increase"):
        read_sentences(f"{tmp_path}/d.conllu")


def test_a_folder_of_universal_dependencies(tmp_path):
    for split in ("train", "dev", "test"):
        (tmp_path / f"xx_y-ud-{split}.conllu").write_text(CONLLU)
    source, task = CoNLLU(str(tmp_path)), TokenClassification(sequence_length=32)
    loaded = load(source, task, batch_size=2)
    assert set(loaded.splits) == {"validation", "test"}
    assert loaded.facts.class_names == ("ADP", "AUX", "DET", "INTJ", "PART", "PRON", "PUNCT", "VERB")
    (batch,) = loaded.splits["test"]
    assert batch["mask"].sum() == 9
    assert bytes(batch["tokens"][0][batch["mask"][0]].tolist()) == b"I n  ae."  # the first byte of each word
    assert (batch["targets"][~batch["mask"]] == 0).all()
    (tmp_path / "xx_y-ud-train.conllu").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no file named after the split train, such as train\.conllu"):
        load(source, task)


TAGS = ["A", "B", "C"]
TEXTS = ["the quick brown fox", "don't do that, naïve Ünïcode 漢字 !", "a" * 30]
CODERS = [
    train(kind, TEXTS, encoded.ROLES, **options)
    for kind, options in (("bytes", {}), ("bpe", {"vocab_size": 300}), ("words", {}))
]
WORD = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
SENTENCE = st.lists(st.tuples(WORD, st.sampled_from(TAGS)), min_size=1, max_size=12)


@settings(max_examples=200)
@given(st.lists(SENTENCE, min_size=1, max_size=4), st.sampled_from(CODERS), st.integers(4, 24))
def test_tags_are_recovered(sentences, coder, length):
    """Check that tags are recovered for arbitrary words, including words with spaces and words split over rows."""
    sentences = [TaggedSentence(*zip(*sentence)) for sentence in sentences]
    source = encode(sentences, TAGS, coder, length)
    batch = source.take(np.arange(len(source)))
    assert batch["tokens"].shape == (len(source), length)
    actual = [TAGS[number] for number in batch["targets"][batch["mask"]]]
    assert actual == [tag for sentence in sentences for tag in sentence.tags]
    of_sentences = np.bincount(source.origins, batch["mask"].sum(axis=1)).tolist()
    assert of_sentences == [len(sentence.tags) for sentence in sentences]
    assert (batch["tokens_mask"] | ~batch["mask"]).all()
    assert not (batch["mask"] & np.isin(batch["tokens"], [coder.cls, coder.sep, coder.pad])).any()


@settings(max_examples=100)
@given(st.lists(SENTENCE, min_size=1, max_size=4), st.integers(16, 40))
def test_tokens_of_a_word_decode_to_its_text(sentences, length):
    """Check, with byte tokens, that the tokens from the start of a word up to the next one decode to the word."""
    coder = CODERS[0]
    sentences = [TaggedSentence(*zip(*sentence)) for sentence in sentences]
    source = encode(sentences, TAGS, coder, length)
    words = []
    for row, mask in zip(source.tokens, source.per_token["mask"]):
        bounds = [*np.flatnonzero(mask), len(row) - 1]
        words += [bytes(row[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    assert words == [word.encode()[: length - 2] for sentence in sentences for word in sentence.words]


def test_words_without_tokens_become_mask_tokens():
    coder = CODERS[2]
    sentence = TaggedSentence(["the", "\u200b", " \t", "fox"], ["A", "B", "C", "A"])
    source = encode([sentence], TAGS, coder, 8)
    batch = source.take(np.array([0]))
    assert batch["targets"][batch["mask"]].tolist() == [0, 1, 2, 0]
    assert source.tokens[0][3] == coder.mask


def test_sentences_are_texts_for_masked_lm(tmp_path):
    (tmp_path / "a-train.conllu").write_text(f"{CONLLU}\n" * 3)
    (tmp_path / "a-dev.conllu").write_text(CONLLU)
    facts = load(CoNLLU(str(tmp_path)), MaskedLM(sequence_length=16), batch_size=1).facts
    assert facts.characters_per_token["validation"] * facts.tokens["validation"] == pytest.approx(24)


CONLL2003 = """\
-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
# SYM O O

-DOCSTART- -X- -X- O

Peter\tNNP  B-NP\tB-PER\x20
Blackburn NNP I-NP I-PER"""


def test_conll2003(tmp_path):
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (tmp_path / name).write_text(CONLL2003)
    (tmp_path / "metadata").write_text("other")
    source = BIO(str(tmp_path))
    assert source.files() == [f"{tmp_path}/{name}" for name in ("eng.train", "eng.testa", "eng.testb")]
    sentences = source.tagged_sentences()
    assert list(sentences) == ["train", "validation", "test"]
    assert sentences["test"] == [
        TaggedSentence(["EU", " rejects", " #"], ["B-ORG", "O", "O"]),
        TaggedSentence(["Peter", " Blackburn"], ["B-PER", "I-PER"]),
    ]
    assert list(source.documents()["train"]) == ["EU rejects #", "Peter Blackburn"]
    chunks = BIO(f"{tmp_path}/eng.train", tag_column=2).tagged_sentences()["train"]
    assert [tag for sentence in chunks for tag in sentence.tags] == ["B-NP", "B-VP", "O", "B-NP", "I-NP"]
    (tmp_path / "tags.txt").write_text("O EU\r\n\r\n \r\nO x\xa0y\r\n", newline="")
    (first, second) = BIO(f"{tmp_path}/tags.txt", word_column=-1, tag_column=0).tagged_sentences()["train"]
    assert (first, second) == (TaggedSentence(["EU"], ["O"]), TaggedSentence(["x\xa0y"], ["O"]))
    facts = load(source, TokenClassification(sequence_length=32), batch_size=1).facts
    assert facts.class_names == ("B-ORG", "B-PER", "I-PER", "O")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("EU B-ORG\n\nEU\n", {}, r"a\.txt, line 3 has 1 columns: the lines before have 2"),
        ("EU\n", {}, r"a\.txt, line 1 has 1 columns: it must have at least 2"),
        ("EU B-ORG\n", {"tag_column": 2}, r"line 1 has 2 columns: it must have at least 3"),
        ("EU B-ORG\n", {"tag_column": -3}, r"line 1 has 2 columns: it must have at least 3"),
        ("\n", {}, r"a\.txt has no sentences"),
    ],
)
def test_wrong_columns_raise(content, options, message, tmp_path):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=message):
        BIO(f"{tmp_path}/a.txt", **options).tagged_sentences()


def test_files_without_sentences_are_named(tmp_path):
    (tmp_path / "train.conllu").write_text(CONLLU)
    (tmp_path / "dev.conllu").write_text("# newdoc\n")
    with pytest.raises(ValueError, match=r"dev\.conllu has no sentences"):
        CoNLLU(str(tmp_path)).tagged_sentences()
    with pytest.raises(ValueError, match=r"dev\.conllu has no sentences"):
        CoNLLU(f"{tmp_path}/train.conllu", validation_path=f"{tmp_path}/dev.conllu").documents()
    assert len(CoNLLU(f"{tmp_path}/*.conllu").tagged_sentences()["train"]) == 2
