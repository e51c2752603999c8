"""The settings of `tokenizer_config.json` change the tokenizer in its folder as in `transformers`."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from lineage.data.tokenizers import TokenizerFile

TEXT = "Hello Fine FILM, caf\u00e9 \u4e2d\u6587"
PIECES = ["hello", "Hello", "fine", "Fine", "film", "FILM", ",", "cafe", "café", "中", "中文", "##文"]


def bert(folder, lowercase):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: id for id, piece in enumerate([*special, *PIECES])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("lowercase", "settings"),
    [
        (True, {"do_lower_case": False}),
        (False, {"do_lower_case": True}),
        (True, {"do_lower_case": True, "strip_accents": False}),
        (False, {"do_lower_case": False, "strip_accents": True}),
        (True, {"do_lower_case": True, "tokenize_chinese_chars": False}),
        (True, {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)
def test_normalization(lowercase, settings, tmp_path):
    bert(tmp_path, lowercase)
    content = {"tokenizer_class": "BertTokenizer"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT, add_special_tokens=False)["input_ids"]
    assert TokenizerFile(str(tmp_path)).train([]).encode(TEXT).tolist() == expected


def test_space_before_a_text(tmp_path):
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator([TEXT + " Hello"] * 3, vocab_size=300, special_tokens=special, show_progress=False)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.save(str(tmp_path / "tokenizer.json"))
    found = []
    for space in (False, True):
        content = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": space}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        expected = transformers.AutoTokenizer.from_pretrained(tmp_path)("Hello")["input_ids"]
        tokenizer = TokenizerFile(str(tmp_path)).train([])
        found.append([0, *tokenizer.encode("Hello").tolist(), 2])
        assert found[-1] == expected
    assert found[0] != found[1]


def test_settings_of_another_type(tmp_path):
    bert(tmp_path, True)
    (path := tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "yes"}')
    with pytest.raises(ValueError, match=f"^{path}: do_lower_case is 'yes': it must be true or false"):
        TokenizerFile(str(tmp_path)).train([])
