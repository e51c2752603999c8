"""The settings of `tokenizer_config.json` change the tokenizer in its folder as in `transformers`."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lineage.data import Tokenizer
from lineage.data.tokenizers import TokenizerFile
from lineage.tasks.text_classification import TextClassification, TextEncoder

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


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": False}, {"keep_accents": True}])
def test_normalization_of_albert(settings, tmp_path):
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [(piece, -1.0) for piece in [*special, "\u2581", *sorted({*(TEXT + TEXT.lower() + "e")} - {" "})]]
    transformers.AlbertTokenizer(vocab=pieces).save_pretrained(tmp_path)
    content = json.loads((path := tmp_path / "tokenizer_config.json").read_text())
    for name in ("do_lower_case", "keep_accents"):
        content.pop(name, None)
    path.write_text(json.dumps(content | settings))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT, add_special_tokens=False)["input_ids"]
    assert TokenizerFile(str(tmp_path)).train([]).encode(TEXT).tolist() == expected


def test_token_that_is_only_in_the_settings_is_refused(tmp_path):
    bert(tmp_path, True)
    content = {"added_tokens_decoder": {"17": {"content": "<new>", "special": False}}}
    (path := tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^{tmp_path} adds the token '<new>' with the id 17, which tokenizer.json"):
        TokenizerFile(str(tmp_path)).train([])
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    content["added_tokens_decoder"]["4"] = {"content": "[MASK]", "special": True}
    path.write_text(json.dumps(content))
    assert TokenizerFile(str(tmp_path)).train([]).encode("fine <new>").tolist() == [7, 17]
    path.write_text('{"added_tokens_decoder": ["<new>"]}')
    with pytest.raises(ValueError, match="it must map ids to the properties of tokens"):
        TokenizerFile(str(tmp_path)).train([])


def test_old_files(tmp_path):
    """Check `added_tokens.json` and `special_tokens_map.json`, which `added_tokens_decoder` has replaced."""
    bert(tmp_path, True)
    (settings := tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (added := tmp_path / "added_tokens.json").write_text('{"<new>": 17, "<also>": 18}')
    (special := tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<new>"]}')
    with pytest.raises(ValueError, match=f"^{tmp_path} adds the token '<also>' with the id 18, which tokenizer.json"):
        TokenizerFile(str(tmp_path)).train([])
    added.write_text('{"<new>": 17}')
    special.write_text('{"additional_special_tokens": ["<new>"], "eos_token": {"content": "[MASK]"}}')
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert TokenizerFile(str(tmp_path)).train([]).end_of_text == reference.eos_token_id == 4
    added.write_text('{"<also>": 17}')
    settings.write_text('{"added_tokens_decoder": {}}')
    assert TokenizerFile(str(tmp_path)).train([]).end_of_text == 3


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


@pytest.mark.parametrize("kind", ["bert", "template", "sequence"])
@pytest.mark.parametrize("names", [None, ["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]])
@pytest.mark.parametrize("cls", ["BertTokenizer", "TokenizersBackend"])
def test_segments_of_pairs(cls, names, kind, tmp_path):
    """Check that both texts have segment 0 if `model_input_names`, or the default of the class, omits the segments."""
    bert(tmp_path, True)
    backend = tokenizers.Tokenizer.from_file(str(path := tmp_path / "tokenizer.json"))
    step = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    if kind != "bert":
        layout = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
        step = processors.TemplateProcessing(*layout, [("[CLS]", 2), ("[SEP]", 3)])
    backend.post_processor = processors.Sequence([step]) if kind == "sequence" else step
    backend.save(str(path))
    content = {"tokenizer_class": cls} | ({} if names is None else {"model_input_names": names})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("hello fine", "film")
    tokenizer = TokenizerFile(str(tmp_path)).train([])
    (row,) = TextEncoder(TextClassification(sequence_length=6), tokenizer, {}, 0).encode([("hello fine", "film")])
    assert row["tokens"].tolist() == theirs["input_ids"]
    assert row["segments"].tolist() == theirs.get("token_type_ids", [0] * 6)


@pytest.mark.parametrize("cleaned", [None, False, True])
@pytest.mark.parametrize("kind", ["wordpiece", "words", "none", "bpe"])
def test_spaces_in_decoded_texts(kind, cleaned, tmp_path):
    """Check `clean_up_tokenization_spaces`, also after saving; it does not apply to BPE."""
    text = "it is , well . do n't ! the man 's ' a ' ? they 've 're 'm"
    vocabulary = {piece: id for id, piece in enumerate(["[UNK]", *dict.fromkeys(text.split())])}
    model = {"wordpiece": models.WordPiece, "bpe": lambda vocabulary, **options: models.BPE(vocabulary, [], **options)}
    backend = tokenizers.Tokenizer(model.get(kind, models.WordLevel)(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind != "none":
        backend.decoder = decoders.WordPiece(cleanup=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": cleaned}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer, ids = TokenizerFile(str(tmp_path)).train([]), [*range(1, len(vocabulary))]
    tokenizer.save(tmp_path / "saved")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).decode(ids)
    assert tokenizer.decode(ids) == Tokenizer.load(tmp_path / "saved").decode(ids) == expected
    assert (" ," in expected) == (not cleaned or kind == "bpe")


def test_inputs_of_another_type(tmp_path):
    bert(tmp_path, True)
    (path := tmp_path / "tokenizer_config.json").write_text('{"model_input_names": "input_ids"}')
    with pytest.raises(ValueError, match=f"^{path}: model_input_names is 'input_ids': it must be a list"):
        TokenizerFile(str(tmp_path)).train([])


def test_settings_of_another_type(tmp_path):
    bert(tmp_path, True)
    (path := tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "yes"}')
    with pytest.raises(ValueError, match=f"^{path}: do_lower_case is 'yes': it must be true or false"):
        TokenizerFile(str(tmp_path)).train([])
