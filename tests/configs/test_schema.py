"""Config sections from dataclasses: keys, defaults, variants, choices, documentation."""

import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, ClassVar, Literal

import pytest
from ml_collections import ConfigDict

from lineage import models
from lineage.configs import base, cli, schema
from lineage.configs.registry import (
    Range,
    Registry,
    check_expressions,
    check_matches,
    check_ranges,
    field_types,
    from_data,
    typed,
    variants,
)
from lineage.configs.run import Run
from lineage.evaluation import EVALUATORS, Evaluator
from lineage.tasks import TASKS, Task

THINGS = Registry("thing")


@THINGS.register("part")
@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        size: in meters.
    """

    VARIANTS: ClassVar = {"big": {"size": 3.0}}

    size: Annotated[float, Range(0, below=10)] = 1.0
    kind: Literal["round", "square"] = "round"

    def __post_init__(self):
        check_ranges("part", self)


@THINGS.register("whole")
@dataclass(frozen=True)
class Whole:
    """A whole.

    Attributes:
        part: of it.
        depth, width: numbers of
            layers and of units.
    """

    VARIANTS: ClassVar = {
        "small": {"depth": 2, "part": {"name": "part", "size": 2.0}},
        "large": {"depth": 4, "part": {"name": "part", "variant": "big"}},
    }
    FROM_DATA = ("classes",)

    part: Part
    classes: int = 10
    depth: int = 1
    width: int = 8
    tied: bool = False
    note: str | None = None
    sizes: tuple[int, ...] | None = None


def whole(**changes):
    return schema.section(THINGS, "whole", **changes)


def test_section_has_defaults_and_empty_keys_for_inferred_values():
    empty = dict.fromkeys(("variant", "classes", "depth", "note", "sizes"))
    part = {"name": "part", "variant": None, "size": None, "kind": "round"}
    assert whole().to_dict() == {"name": "whole", "part": part, "width": 8, "tied": False} | empty


def test_empty_keys_are_typed():
    section = whole()
    section.update(classes=3, depth=2, sizes=(1, 2), note="x", variant="small")
    section.part.size = 1.5
    for key, value in {"classes": "3", "depth": 2.5, "sizes": 3, "note": 1, "variant": 1, "width": "8"}.items():
        with pytest.raises(TypeError):
            section[key] = value


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({"part": {"size": 1.0}}, {}, Whole(Part())),
        ({"variant": "small"}, {}, Whole(Part(2.0), depth=2)),
        ({"variant": "large"}, {}, Whole(Part(3.0), depth=4)),
        ({"variant": "small"}, {"classes": 3, "depth": 5, "color": "red"}, Whole(Part(2.0), classes=3, depth=5)),
        ({"variant": "small", "classes": 7, "depth": 1}, {"classes": 3, "depth": 5}, Whole(Part(2.0), 7, 1)),
        (
            {"variant": "small", "tied": False, "width": 0},
            {"tied": True, "width": 3},
            Whole(Part(2.0), depth=2, width=0),
        ),
        ({"variant": "large", "part": {"size": 0.0, "kind": "square"}}, {}, Whole(Part(0.0, "square"), depth=4)),
    ],
)
def test_config_takes_precedence_over_data_variant_and_default(changes, given, expected):
    section = whole(**changes)
    assert schema.build(THINGS, section, **given) == expected
    assert schema.build(THINGS, section.to_dict(), **given) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"variant": "small"},
        {"variant": "small", "depth": 7},
        {"variant": "large"},
        {"variant": "large", "part": {"size": 0.0, "kind": "square"}},
        {"part": {"variant": "big"}},
    ],
)
def test_resolved_section_does_not_depend_on_variants_and_defaults(changes, monkeypatch):
    section, stored = whole(**changes), whole(**changes)
    expected = schema.build(THINGS, section, classes=3)
    schema.resolve(THINGS, stored, {})
    assert None not in (stored.depth, stored.part.size)
    assert stored.classes is None  # of the data
    released = stored.copy_and_resolve_references()
    schema.release(THINGS, released, {})
    assert released.to_dict() == section.to_dict()
    monkeypatch.setattr(Whole, "VARIANTS", {name: {"depth": 9, "part": {"name": "part"}} for name in Whole.VARIANTS})
    monkeypatch.setattr(Part, "VARIANTS", {"big": {"size": 9.0}})
    for _ in range(2):
        assert schema.build(THINGS, stored, classes=3) == expected
        schema.release(THINGS, stored, {})  # as on loading


def test_resolved_section_has_the_values_of_the_task():
    section = whole(variant="small")
    schema.resolve(THINGS, section, {"depth": 5, "color": "red"})
    assert section.depth == schema.build(THINGS, whole(variant="small"), depth=5).depth == 5
    schema.release(THINGS, section, {"depth": 5})
    assert section.depth is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: whole(widht=3), r"Whole has no key 'widht'\. Did you mean 'width'\? Available: variant, part"),
        (lambda: THINGS.build("hole"), r"Unknown thing 'hole'\. Did you mean 'whole'\? Available: part, whole"),
        (lambda: THINGS.build("whole"), "whole needs part: give it, or a variant of small, large"),
        (lambda: THINGS.build("part", "bigg"), r"Unknown variant of part 'bigg'\. Did you mean 'big'\?"),
        (lambda: THINGS.build("part", siz=1.0), r"Unknown setting of part 'siz'\. Did you mean 'size'\?"),
        (lambda: THINGS.build("part", kind="sqare"), r"thing.kind is 'sqare'\. Did you mean 'square'\?"),
        (lambda: THINGS.build("part", size=-1.0), r"part\.size is -1\.0: it must be 0 or more and below 10\."),
        (lambda: Part(float("nan")), r"part\.size is nan"),
        (lambda: Run(seed=-1), r"^seed is -1: it must be 0 or more\."),
    ],
)
def test_invalid_values_raise(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_duplicate_name_raises():
    with pytest.raises(ValueError, match="The thing name 'part' is taken by"):
        THINGS.register("part")(Whole)
    assert THINGS.register("part")(Part) is Part


def test_keys_have_documentation_and_readable_types():
    keys = {key.name: key for key in schema.keys(Whole)}
    assert list(keys) == ["variant", "part", "classes", "depth", "width", "tied", "note", "sizes"]
    assert keys["depth"].documentation == keys["width"].documentation == "numbers of layers and of units."
    assert keys["note"].type == "str or None"
    assert keys["variant"].type == "'small' | 'large'"
    assert schema.keys(Part)[-1].type == "'round' | 'square'"


@pytest.mark.parametrize("name", models.MODELS)
def test_model_sections_match_the_defaults_of_their_class(name):
    cls, section = models.MODELS[name], schema.section(models.MODELS, name)
    own = {field.name: field for field in fields(cls) if field.name in field_types(cls)}
    assert set(section) == {"name", "variant", *own}
    decided = {*from_data(cls), *(key for settings in variants(cls).values() for key in settings)}
    assert decided <= set(own)
    for key, field in own.items():
        value = section[key]
        if isinstance(value, ConfigDict):
            assert key in decided
        else:
            assert value == (None if key in decided or field.default is MISSING else field.default), key


@pytest.mark.parametrize("name", models.MODELS)
def test_section_builds_the_same_model_as_models_build(name):
    needed = {"vocab_size": 11} if name in ("elmo", "seq2seq", "transformer") else {}
    for variant in [*variants(models.MODELS[name]), *([] if name == "detr" else [None])]:
        section = schema.section(models.MODELS, name, variant=variant)
        assert schema.build(models.MODELS, section, **needed) == models.build(name, variant, **needed)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_key_is_documented(name):
    assert [key.name for key in schema.keys(models.MODELS[name]) if not key.documentation] == []


@pytest.mark.parametrize(
    ("allowed", "text", "inside", "outside"),
    [
        (Range(1), "1 or more", (1, 2.5, (1, 3), None), (0.9, (1, 0), ([1, 2],), math.nan)),
        (Range(above=0, below=1), "above 0 and below 1", (0.5, ()), (0, 1)),
        (Range(0, high=1), "0 or more and at most 1", (0, 1), (-0.1, 1.1, math.inf)),
        (Range(1, other=-1), "1 or more, or -1", (1, -1), (0, -2)),
    ],
)
def test_ranges(allowed, text, inside, outside):
    assert str(allowed) == text
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)


@pytest.mark.parametrize("name", cli.experiments())
def test_every_key_of_an_experiment_is_documented(name):
    config, _ = cli.load(f"{name}:cola" if name == "bert_glue" else name)
    described = schema.describe(config, base.classes(config))
    texts = {path: key.documentation.removeprefix(schema.NAME).strip() for path, (key, _) in described.items()}
    assert [path for path, text in texts.items() if not text or re.search("^see |see above|likewise", text)] == []


def test_keys_of_a_backbone_are_described_by_its_class():
    config, _ = cli.load("detr_shapes")
    key, value = schema.describe(config, base.classes(config))["model.backbone.stem_width"]
    assert value == config.model.backbone.stem_width
    assert key.type == "int, 1 or more"
    assert key.documentation == schema.documentation(models.MODELS["resnet"])["stem_width"]


def test_part_of_another_class_has_the_defaults_of_that_class():
    backbone = schema.section(models.MODELS, "detr").backbone
    assert (backbone.name, backbone.frozen) == ("resnet", None)  # the variants set `frozen`
    swin = schema.section(models.MODELS, "swin").to_dict()
    assert schema.section(models.MODELS, "detr", backbone={"name": "swin"}).backbone.to_dict() == swin


def test_optional_choices_show_none():
    assert schema.readable(Literal["dots", "full"] | None) == "'dots' | 'full' | None"
    assert schema.readable(Literal["dots", "full"]) == "'dots' | 'full'"
    assert schema.describe(whole(), {})["note"][0].type == "str or None"


def test_keys_show_their_range():
    (key,) = (key for key in schema.keys(Part) if key.name == "size")
    assert key.type == "float, 0 or more and below 10"


def test_name_of_returns_the_name_of_the_class():
    assert THINGS.name_of(Part()) == "part"
    assert THINGS.name_of(3) == "int"


def test_registering_a_class_that_is_not_a_dataclass_raises():
    class Undecorated(Part):
        color: str = "red"

    with pytest.raises(ValueError, match=r"The thing .*Undecorated must be a dataclass: add @dataclass"):
        THINGS.register("undecorated")(Undecorated)


@pytest.mark.parametrize("registry", [*base.REGISTRIES.values(), EVALUATORS], ids=lambda registry: registry.kind)
def test_classes_without_the_base_class_are_refused(registry):
    """Otherwise, the run would end where an attribute of the base class is used, with a traceback."""

    @dataclass(frozen=True)
    class Alone:
        color: str = "red"

    with pytest.raises(ValueError, match=rf"The {registry.kind} .*Alone must inherit from lineage\.[\w.]+\.[A-Z]\w+\."):
        registry.register("alone")(Alone)
    assert "alone" not in registry


def test_classes_without_required_methods_are_refused():
    @dataclass(frozen=True)
    class Misspelled(Evaluator):
        def mesure(self, context, variables, split):
            return {}

    with pytest.raises(ValueError, match=r"Misspelled must have measure, see lineage\.evaluation\.Evaluator\."):
        EVALUATORS.register("misspelled")(Misspelled)

    @dataclass(frozen=True)
    class Unfinished(Task):
        reads = "images"

        def loss(self, model, batch):
            return model, batch, {}

    missing = "examples and axes and needs and arrays, see lineage.tasks.Task"
    with pytest.raises(ValueError, match=f"Unfinished must have {missing}"):
        TASKS.register("unfinished")(Unfinished)


@pytest.mark.parametrize("names", [("colour",), "color"])
def test_fields_from_data_must_exist(names):
    @dataclass(frozen=True)
    class Misspelled(Part):
        FROM_DATA = names
        color: str = "red"

    with pytest.raises(ValueError, match=r"Misspelled: FROM_DATA has 'c(olour)?', which is not a field"):
        THINGS.register("misspelled")(Misspelled)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("1e3", int, 1000),
        (3, float, 3.0),
        ("a,b", tuple, ("a", "b")),
        ("[1, 2]", tuple, (1, 2)),
        ("FALSE", bool, False),
        ("5", str, "5"),
        ("5", type(None), 5),
        ("none", type(None), "none"),
    ],
)
def test_values_are_converted_to_the_type_of_their_key(value, kind, expected):
    actual = typed("key", value, kind)
    assert (actual, type(actual)) == (expected, type(expected))
    assert typed("key", expected, kind) == expected


@pytest.mark.parametrize(
    ("value", "kind"), [("1.5", int), (True, int), (True, float), ("1", bool), ("", tuple), ("None", int), (1, str)]
)
def test_values_of_another_type_raise(value, kind):
    with pytest.raises(ValueError, match=rf"^key is {value!r}: it must be of type {kind.__name__}\.$"):
        typed("key", value, kind)
    assert typed("key", "None", kind, optional=True) is None


@pytest.mark.parametrize("value", ["1e22", "-1e22", 2**63])
def test_integers_of_more_than_64_bits_raise(value):
    with pytest.raises(ValueError, match=rf"^key is {value}: it must have at most 64 bits\.$"):
        typed("key", value, int)
    assert typed("key", str(2**63 - 1), int) == 2**63 - 1


@pytest.mark.parametrize(
    ("items", "paired", "message"),
    [
        (("a+", "("), False, r"key has '\(', which is not a regular expression: "),
        ((("a+", 1.0), ("(", 1.0)), True, r"key has \('\(', 1.0\), which is not a regular expression: "),
        ((("a+", 1.0), "ab"), True, "key has 'ab': it must be a pair of a regular expression and a value"),
        ((("a+", 1.0, 2.0),), True, r"key has \('a\+', 1.0, 2.0\): it must be a pair"),
        ((1,), True, "key has 1: it must be a pair"),
        (((1, "a"),), True, r"key has \(1, 'a'\), which is not a regular expression"),
        ((1,), False, "key has 1, which is not a regular expression"),
    ],
)
def test_invalid_regular_expressions_raise(items, paired, message):
    check_expressions("key", items[:-1], paired)
    with pytest.raises(ValueError, match=message):
        check_expressions("key", items, paired)


def test_regular_expressions_must_match():
    check_matches("key", ("b$", "^a"), ("a/c", "a/b"))
    with pytest.raises(ValueError, match=r"^key has '\^b', which matches no parameter; one is 'a/c'\.$"):
        check_matches("key", ("b$", "^b"), ("a/c", "a/b"))


def test_a_key_of_an_evaluator_that_is_not_added_says_how_to_add_it():
    config = base.get_config("vit", "image_classification", "digits")
    with pytest.raises(ValueError, match=r"no evaluator 'knn' \(--config.evaluators.knn=KIND adds it"):
        cli.override(config, {"evaluators.knn.count": "7"})
    cli.override(config, {"evaluators.knn.count": "7", "evaluators.knn": "knn"})
    assert config.evaluators.knn.count == 7


@pytest.mark.parametrize(
    ("part", "name"), [("model", "swin"), ("optimizer", "lamb"), ("task", "masked_autoencoding"), ("schedule", "wsd")]
)
def test_a_name_is_not_assigned(part, name):
    """Check that a section is replaced: after an assignment, it would have the keys and defaults of another class."""
    config = base.get_config("vit", "image_classification", "digits")
    before = config[part].name
    with pytest.raises(ValueError, match=rf"^the section '{before}' cannot become '{name}' .* use choose\(config"):
        config[part].name = name
    config[part].name = before
    base.choose(config, part, name)
    assert base.resolved(config)[part].name == name


@pytest.mark.parametrize(
    ("old", "heads", "new"), [("vit", 2, "swin"), ("swin", (1, 2, 2, 4), "vit"), ("transformer_xl", 2, "swin")]
)
def test_a_changed_value_of_another_type_is_not_kept(old, heads, new):
    config = base.get_config(old)
    config.model.update(num_heads=heads, dropout=0.3)
    cli.override(config, {"model.name": new})
    assert (config.model.num_heads, config.model.dropout) == (base.get_config(new).model.num_heads, 0.3)


@pytest.mark.parametrize("key", ["modell", "model.variant", "evaluators", "evaluator.knn", "evaluators.loss.name.x"])
def test_a_key_that_chooses_no_part_is_refused(key):
    config = base.get_config()
    with pytest.raises(ValueError, match=rf"^{key!r} chooses no part.*: it must be source, .* or evaluators.NAME"):
        base.choose(config, key, "swin")
    assert config == base.get_config()
