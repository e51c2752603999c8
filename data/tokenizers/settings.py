"""Settings of a `tokenizer_config.json`, which apply to the `tokenizer.json` in its folder, as in `transformers`."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from lineage.configs.atomic import MAX_JSON, regular
from lineage.configs.storage import is_present, local
from lineage.data.tokenizers.tokenizer import Tokenizer

SETTINGS = "tokenizer_config.json"
INPUTS = "model_input_names"
NEWEST = "TokenizersBackend"  # class of transformers 5, which has no segments unless `model_input_names` has them
GENERIC = ("PreTrainedTokenizerFast", NEWEST)  # classes that use `tokenizer.json` as it is
# Setting -> field of BERT's normalizer.
NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Setting of ALBERT -> the value that removes steps of its normalizer, and the types of these steps.
OMITTED = {"do_lower_case": (False, ("Lowercase",)), "keep_accents": (True, ("NFKD", "StripAccents"))}
ADDED = "added_tokens_decoder"
LEGACY = "special_tokens_map.json", "added_tokens.json"  # read in folders whose settings do not have `ADDED`
CLEAN_UP = "clean_up_tokenization_spaces"
CLEANED = (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")
CLEANED += (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")  # replaced in this order


def read_settings(folder: str) -> dict[str, Any]:
    """Return the settings in the `tokenizer_config.json` and the old files in a folder; {} if it has none of them."""
    settings = _read(path := f"{folder}/{SETTINGS}")
    if ADDED not in settings:
        special, added = (_read(f"{folder}/{name}") for name in LEGACY)
        settings |= special
        values = map(_name, chain(*(value if isinstance(value, list) else [value] for value in settings.values())))
        names = {name for name in values if isinstance(name, str)}
        if added:
            settings[ADDED] = {str(id): {"content": name, "special": name in names} for name, id in added.items()}
    for name in (*NORMALIZER, "keep_accents", "add_prefix_space", CLEAN_UP):
        if settings.get(name) not in (None, False, True):
            raise ValueError(f"{path}: {name} is {str(settings[name])[:60]!r}: it must be true or false.")
    if not isinstance(settings.get(INPUTS) or [], list):
        raise ValueError(f"{path}: {INPUTS} is {str(settings[INPUTS])[:60]!r}: it must be a list.")
    added = settings.get(ADDED) or {}
    if not isinstance(added, dict) or not all(isinstance(token, dict) for token in added.values()):
        raise ValueError(f"{path}: {ADDED} is {str(added)[:60]!r}: it must map ids to the properties of tokens.")
    return settings


def _read(path):
    """Return the object in a JSON file; {} if there is no such file."""
    try:
        content = regular(Path(local(path)), MAX_JSON).read_bytes() if is_present(local(path)) else b"{}"
    except FileNotFoundError:  # on the Hub
        return {}
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}.") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object: it is a {type(settings).__name__}.")
    return settings


def _name(token):
    """Return the name of a token, which may be given with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def check_added(folder: str, settings: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Raise ValueError if a token that the settings in a folder add is not in an older `tokenizer.json`.

    Special tokens need not be: their names are not recognized in texts.
    """
    known = {token["content"]: str(token["id"]) for token in json.loads(tokenizer.to_str())["added_tokens"]}
    for number, token in (settings.get(ADDED) or {}).items():
        if not token.get("special") and known.get(name := str(token.get("content"))) != number:
            given = f"{folder} adds the token {name[:60]!r} with the id {number[:60]}"
            raise ValueError(f"{given}, which tokenizer.json must have: save it again with `transformers`.")


def configured(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer with these settings.

    They change the normalizer of BERT and ALBERT, the space before a text of byte-level tokenizers, the segments of
    pairs, the spaces in decoded texts, and the end of text.
    """
    if not settings:
        return tokenizer
    spec = json.loads(tokenizer.to_str(marked=False))
    kind, end = settings.get("tokenizer_class"), _name(settings.get("eos_token"))
    changed = spec | ({} if kind in GENERIC else _preprocessing(spec, settings))
    names = settings.get(INPUTS) or (["input_ids"] if kind == NEWEST else [])
    if names and "token_type_ids" not in names and tokenizer.encloses and tokenizer.segments > 1:
        changed |= {"post_processor": _one_segment(spec["post_processor"])}
    if settings.get(CLEAN_UP) and spec["model"]["type"] != "BPE":  # as in the reference
        changed |= {"decoder": _cleaning(spec["decoder"])}
    tokenizer = tokenizer if changed == spec else tokenizer.rebuilt(changed)
    return tokenizer.ending([end] if isinstance(end, str) else [])


def _preprocessing(spec, settings):
    """Return the parts of a tokenizer that change with the settings of BERT, ALBERT and byte-level tokenizers."""
    if spec["model"]["type"] == "Unigram" and (steps := (spec["normalizer"] or {}).get("normalizers")):
        omitted = [step for name, (value, found) in OMITTED.items() if settings.get(name) is value for step in found]
        return {"normalizer": spec["normalizer"] | {"normalizers": [s for s in steps if s["type"] not in omitted]}}
    fields = {field: settings[name] for name, field in NORMALIZER.items() if name in settings}
    fields = {field: value for field, value in fields.items() if value is not None or field == "strip_accents"}
    space = {"add_prefix_space": settings["add_prefix_space"]} if settings.get("add_prefix_space") is not None else {}
    parts = ("normalizer", "BertNormalizer", fields), ("pre_tokenizer", "ByteLevel", space)
    parts += (("post_processor", "RobertaProcessing", space),)
    return {name: spec[name] | new for name, kind, new in parts if spec[name] and spec[name].get("type") == kind}


def _one_segment(step):
    """Return a post-processor, or one step of it, with the same segment for both texts of a pair."""
    if step.get("type") == "Sequence":
        return step | {"processors": [*map(_one_segment, step["processors"])]}
    if step.get("type") == "BertProcessing":
        (sep, _), (cls, _) = step["sep"], step["cls"]
        layout = f"{cls} $A {sep}", f"{cls} $A {sep} $B {sep}"
        return json.loads(TemplateProcessing(*layout, [(*step["sep"],), (*step["cls"],)]).__getstate__())
    if step.get("type") == "TemplateProcessing":
        pair = [{kind: part | {"type_id": 0} for kind, part in piece.items()} for piece in step["pair"]]
        return step | {"pair": pair}
    return step


def _cleaning(decoder):
    """Return a decoder that also cleans up the spaces; without a decoder, there are spaces between all tokens."""
    replaced = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in CLEANED]
    first = decoder or {"type": "WordPiece", "prefix": "\0", "cleanup": False}
    return {"type": "Sequence", "decoders": [first, {"type": "Fuse"}, *replaced]}
