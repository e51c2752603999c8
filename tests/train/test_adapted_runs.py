"""Runs with adapters (LoRA, SVF), mixtures of experts, and initialization from other runs."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from lineage.configs import adoption
from lineage.configs.run import Init
from lineage.data import Facts
from lineage.data.examples.pairs import Continuations
from lineage.data.examples.windows import Windows
from lineage.data.tokenizers.kinds import Characters
from lineage.models import convert
from lineage.models.bart import BART
from lineage.models.layers.position import resample
from lineage.models.swin import Swin
from lineage.models.vit import ViT
from lineage.train import expert_mixture, loop, pretrained, trained
from lineage.train.adapters import ADAPTERS, Adapter
from lineage.train.checkpoint import Checkpoints
from lineage.train.experiment import Experiment
from lineage.train.expert_mixture import cross_entropy_search
from lineage.train.preparation import compile_step, device_batches, initial_state
from lineage.train.reading import read_newest, read_variables
from lineage.train.step import TrainState
from tests.tiers import tiered
from tests.train.conftest import without_report

ONE = {"devices": jax.devices()[:1]}
SMALL = {"model.depth": 1, "source.max_bytes": 8_000, "schedule": "constant", "checkpoint.keep": 9}
LORA = {
    "adapter.name": "lora",
    "adapter.rank": 2,
    "adapter.trained": ("^norm/",),
    "ema_decay": 0.5,
    "grad_accum_steps": 2,
}


@pytest.fixture(scope="module")
def learned(tiny, tmp_path_factory):
    """Return `learn(changes, *steps)`, which trains to each of the steps in turn and returns the workdir."""

    def learn(changes, *steps):
        workdir = tmp_path_factory.mktemp("run")
        for total in steps:
            config = tiny("gpt", SMALL | {"total_steps": total, "evaluate_every_steps": 9} | dict(changes))
            loop.train(config, workdir, **ONE)
        return workdir

    with pytest.MonkeyPatch.context() as patch:
        without_report(patch)
        yield learn


@jax.tree_util.register_static
@dataclass(frozen=True)
class Biases(Adapter):
    """Train the biases, as an adapter in a user's file does."""

    def init(self, params, kernels, key):
        flat = flatten_dict(params)
        trained = {path: value for path, value in flat.items() if path[-1] == "bias"}
        return unflatten_dict(trained), unflatten_dict({path: flat[path] for path in flat.keys() - trained})

    def apply(self, frozen, trained):
        return unflatten_dict(flatten_dict(frozen) | flatten_dict(trained))

    def rebase(self, trained, frozen, params):
        return self.init(params, {}, None)


def test_an_adapter_of_ones_own_trains_a_part_of_the_parameters(learned, monkeypatch):
    monkeypatch.setitem(ADAPTERS, "biases", Biases)
    base = learned({}, 1)
    before = flatten_dict(read_variables(base)["params"], sep="/")
    start = {"adapter": "biases", "init.path": str(base)}
    after = flatten_dict(read_variables(learned(start, 2))["params"], sep="/")
    moved = {path for path, value in after.items() if not np.array_equal(value, before[path])}
    assert moved
    assert moved <= {path for path in after if path.endswith("bias")}
    with pytest.raises(ValueError, match=r"The adapter 'biases' freezes new parameters.*: norm/scale"):
        learned(start | {"init.skip": ("^norm/",)}, 1)


@pytest.fixture(scope="module")
def base(learned):
    return learned({}, 2)


def adapted(tiny, base, changes=()):
    """Return an experiment that adapts the base, and its initial state."""
    experiment = Experiment(tiny("gpt", SMALL | {"init.path": str(base)} | dict(changes)), **ONE)
    make = jax.jit(experiment.make_state)
    return experiment, pretrained.start_from(experiment.abstract_state, experiment.model, experiment.run.init, make)[0]


@pytest.fixture(scope="module")
def lora(learned, base):
    return learned(LORA | {"init.path": str(base)}, 4)


def flat(tree):
    return {"/".join(path): np.asarray(value) for path, value in flatten_dict(tree).items()}


def test_base_parameters_do_not_change(lora, base):
    """Check that base parameters are bit-identical after training, and that the merged parameters are returned."""
    before, saved = flat(read_variables(base)["params"]), read_newest(lora)
    kept, own = flat(saved.frozen["params"]), flat(saved.params)
    assert kept.keys() | {"norm/scale", "norm/bias"} == before.keys()
    for path, value in kept.items():
        assert value.tobytes() == before[path].tobytes(), path
    assert all("lora/" in path or path.startswith("norm/") for path in own)
    assert all(value.any() for path, value in own.items() if path.endswith("/b"))
    assert (own["norm/scale"] != before["norm/scale"]).any()
    after, owner = flat(read_variables(lora)["params"]), "stack/layers/mlp/up"
    product = own[f"lora/{owner}/a"][0] @ own[f"lora/{owner}/b"][0] * 8  # alpha / rank
    np.testing.assert_allclose(after[f"{owner}/kernel"][0] - before[f"{owner}/kernel"][0], product, atol=1e-6)


@pytest.mark.thorough
def test_optimizer_state_covers_adapters_only(tiny, base):
    state = adapted(tiny, base, LORA)[1]
    count = sum(a.size for a in jax.tree.leaves(state.params))
    assert sum(a.size for a in jax.tree.leaves(state.opt_state)) == 2 * count + 2  # moments and two counts
    theirs, ours = read_variables(base)["params"], state.variables(average=True)["params"]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@tiered("optimizer", ["prodigy", "schedule_free_adamw"])
def test_optimizer_starts_from_the_loaded_parameters(optimizer, tiny, base, tmp_path):
    """Check that a step accepts the state, also with the average of `schedule_free_adamw` in the memory of the host."""
    changes = SMALL | {"init.path": str(base), "optimizer.name": optimizer, "total_steps": 1}
    changes["offload"] = optimizer == "schedule_free_adamw"
    experiment = Experiment(tiny("gpt", changes), tmp_path, **ONE)
    with Checkpoints(tmp_path) as checkpoints:
        state = initial_state(experiment, checkpoints, print)
    expected = experiment.make_optimizer().init(read_variables(base)["params"])
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, expected)
    compile_step(experiment, state)(state, next(device_batches(experiment, 0)))  # each array is donated once


@pytest.mark.thorough
def test_resume_of_lora_is_bit_exact(learned, lora, base):
    halves = learned(LORA | {"init.path": str(base)}, 2, 4)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), *map(read_newest, (halves, lora)))


@pytest.mark.thorough
def test_resume_of_svf_is_bit_exact(learned, tiny, base):
    """Check that the base is restored from the run itself, not from `init.path`."""
    svf = {"adapter.name": "svf", "init.path": str(base)}
    whole, halves = learned(svf, 4), learned(svf, 2)
    config = tiny("gpt", SMALL | svf | {"total_steps": 4, "evaluate_every_steps": 9})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "start_from", lambda *args, **options: pytest.fail("started anew"))
        loop.train(config, halves, **ONE)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), *map(read_newest, (halves, whole)))
    before = flat(read_newest(base).params)
    saved = read_newest(halves)
    assert all(value.tobytes() == before[path].tobytes() for path, value in flat(saved.frozen["params"]).items())
    assert all((value != 1).any() for value in flat(saved.params).values())


def expert(tiny, base, folder, size, **changes):
    """Write an expert with random SVF factors of the given standard deviation, and return its workdir."""
    experiment, state = adapted(tiny, base, {"adapter.name": "svf"} | changes)
    random = np.random.default_rng(list(folder.name.encode()))
    factors = jax.tree.map(lambda a: a + jnp.float32(size * random.normal(size=a.shape)), state.params)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(state.replace(params=factors, step=jnp.int32(1)), experiment.config.to_dict(), {})
    return str(folder)


@pytest.fixture(scope="module")
def crowd(tiny, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    return [expert(tiny, base, folder / name, 0.3) for name in ("one", "two")]


@pytest.mark.thorough
def test_few_shot_mixture_lowers_the_loss(tiny, base, crowd):
    """Check that the loss of the mixture on the examples is below those of the base and of each expert."""
    changes = {"experts.paths": tuple(crowd), "experts.examples": 8}
    experiment, state = adapted(tiny, base, changes)
    actual, said = expert_mixture.choose(experiment, state)
    assert said.startswith("experts: one ")
    batch = jax.tree.map(jnp.asarray, experiment.data.train[0])

    @jax.jit
    def loss(params):
        total, weight, _ = experiment.task.loss(experiment.model.bind({"params": params}), batch)
        return total / weight

    alone = [float(loss(read_variables(Path(folder))["params"])) for folder in (base, *crowd)]
    assert float(loss(actual.params)) < min(alone) - 1e-3


def preferred(experiment, variables, text):
    """Return the index of the more probable of the answers "one" and "two", scored token by token."""
    scores = []
    for name in ("one", "two"):
        tokens = experiment.data.tokenizer.encode(f"{text} ({name})")
        logits = experiment.model.apply(variables, jnp.asarray(tokens[None]))
        chances = jax.nn.log_softmax(logits)[0, len(text) + 1 : -1]  # of the tokens after "text ("
        scores.append(float(chances[np.arange(len(chances)), tokens[len(text) + 2 :]].sum()))
    return int(np.argmax(scores))


ONE_OF_TWO = ("experts: one 1.00, two 0.00", "experts: one 0.00, two 1.00")
ASKED = {"experts.choice": "prompt", "experts.question": "{text} ({name})"}


@pytest.mark.thorough
def test_prompt_selects_the_most_probable_expert(tiny, base, crowd):
    experiment, state = adapted(tiny, base, ASKED | {"experts.paths": tuple(crowd)})
    found, said = expert_mixture.choose(experiment, state, "def")
    best = preferred(experiment, state.variables(), "def")
    assert said == ONE_OF_TWO[best]
    theirs = read_variables(Path(crowd[best]))["params"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found.params, theirs)


def test_questions_are_about_the_inputs_of_examples():
    words = [np.array(tokens) for tokens in ([5, 6], [7, 8, 9])]  # input and target
    pair = Continuations(words[:1], words[1:], [""], length=8, end=0, start=None)[0]
    np.testing.assert_array_equal(expert_mixture.input_tokens(pair["tokens"], pair["mask"]), words[0])
    text = Windows(np.array([5, 6, 7, 8]), 4)[0]
    np.testing.assert_array_equal(expert_mixture.input_tokens(text["tokens"], text["mask"]), [5, 6, 7])


@pytest.mark.thorough
def test_long_prompts_are_truncated_on_the_left(tiny, base, crowd):
    experiment, state = adapted(tiny, base, ASKED | {"experts.paths": tuple(crowd)})
    kept = experiment.model.max_length - len(" (one)")
    ends = (letters * kept for letters in ("def", "a", "e", "in", "s", "t", "(", "\n", "="))
    # Texts for which the second expert is chosen.
    found = (end for end in ends if preferred(experiment, state.variables(), end[-kept:]))
    text = next(found)
    assert expert_mixture.choose(experiment, state, 9 * "x" + text)[1] == ONE_OF_TWO[1]


@pytest.mark.slow
def test_classifier_selects_the_expert(tiny, base, crowd, lora, tmp_path):
    """Check a text for which classifier and base disagree; the folder of the classifier has the name of an expert."""
    judge = expert(tiny, base, tmp_path / "one", 3.0)
    experiment, state = adapted(tiny, base, ASKED | {"experts.paths": tuple(crowd), "experts.classifier": judge})
    models = [jax.tree.map(jnp.asarray, read_variables(Path(folder))) for folder in (judge, base)]
    answers = {text: [preferred(experiment, of, text) for of in models] for text in ("def", "a", "e", "in", "s", "t")}
    text, expected = next((text, ours) for text, (ours, others) in answers.items() if ours != others)
    assert expert_mixture.choose(experiment, state, text)[1] == ONE_OF_TWO[expected]
    experiment.config.experts.classifier = expert(tiny, lora, tmp_path / "stranger", 0.1)
    with pytest.raises(ValueError, match="stranger was trained from a different base model"):
        expert_mixture.choose(experiment, state, text)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts.paths": ()}, r"experts\.paths is empty: it must name"),
        ({"experts.choice": "vote"}, "'vote'.* Available: few_shot, prompt"),
        ({"experts.examples": 9}, r"experts.examples is 9: it must be at most loader\.batch_size"),
        ({"experts.choice": "prompt", "experts.examples": 9}, r"examples is 9: it must be at most loader\.batch_size"),
        ({"experts.choice": "prompt", "experts.question": "{name}?"}, r"must have \{text\} and \{name\}"),
        ({"model.width": 32}, "has another model than the config"),
    ],
)
def test_invalid_expert_options_raise(changes, message, tiny, base, crowd):
    def choose():
        experiment = Experiment(tiny("gpt", SMALL | {"experts.paths": tuple(crowd)} | changes), **ONE)
        expert_mixture.choose(experiment, experiment.abstract_state)

    with pytest.raises(ValueError, match=message):
        choose()


@pytest.mark.thorough
def test_invalid_experts_raise(base, lora, crowd, tmp_path, tiny):
    with pytest.raises(ValueError, match=r"is not a run of adapter\.name='svf' without adapter\.trained"):
        expert_mixture.load([crowd[0], lora])
    with pytest.raises(ValueError, match="is not a run of"):
        expert_mixture.load([base])
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        expert_mixture.load([tmp_path])
    other = expert(tiny, lora, tmp_path / "other", 0.1)
    with pytest.raises(ValueError, match="other was trained from a different base model"):
        expert_mixture.load([crowd[0], other])


@pytest.mark.thorough
def test_experts_of_another_run_raise(tiny, base, lora, crowd, tmp_path):
    """Check a run with other parameters, which the mixture would replace, and experts with another tokenizer."""
    changes = {"experts.paths": tuple(crowd), "experts.examples": 8}
    assert trained.restore(base, changes=changes).experts == tuple(crowd)
    with pytest.raises(ValueError, match=r"one was trained from a different base model than that in .*run"):
        trained.restore(lora, changes=changes)
    config = tiny("gpt", SMALL | changes | {"init.path": str(lora), "total_steps": 0})
    with pytest.raises(ValueError, match="one was trained from a different base model than that in"):
        loop.train(config, tmp_path / "run", **ONE)
    shutil.copytree(crowd[0], tmp_path / "three")
    (tmp_path / "three" / "tokenizer.json").write_text(Characters().train(["def"]).to_str())
    with pytest.raises(ValueError, match=r"the tokenizer of .*three differs from that of the run"):
        trained.restore(base, changes=changes | {"experts.paths": (str(tmp_path / "three"),)})


def test_cross_entropy_search_finds_the_maximum():
    goal = np.array([0.8, -0.3, 1.5])
    actual = cross_entropy_search(lambda x: -np.square(x - goal).sum() if x[0] < 2 else np.nan, 3, seed=1)
    np.testing.assert_allclose(actual, goal, atol=0.02)


@pytest.mark.thorough
def test_parameters_are_renamed(tiny, base):
    """Check `init.rename`; a pair that matches nothing, or maps two parameters to one name, raises."""
    theirs = read_variables(base)["params"]
    changes = {"init.rename": (("^embed/", "elsewhere/"), ("(^|/)norm/bias", r"\1embed/table"))}
    with pytest.raises(ValueError, match=r"embed/table \(16,\), here \(257, 16\): change the model"):
        adapted(tiny, base, changes)
    _, state = adapted(tiny, base, {"init.rename": (("attention_norm", "x"), ("mlp_norm", "attention_norm"))})
    np.testing.assert_array_equal(
        state.params["stack"]["layers"]["attention_norm"]["bias"], theirs["stack"]["layers"]["mlp_norm"]["bias"]
    )
    for pair, what in (
        (("nrom", "x"), "no parameter another name"),
        (("mlp_norm", "attention_norm"), "one name to two"),
    ):
        with pytest.raises(ValueError, match=f"init.rename: .* gives {what}"):
            adapted(tiny, base, {"init.rename": (pair,)})
    with pytest.raises(ValueError, match=r"init\.rename has 'x': it must be a pair"):
        adapted(tiny, base, {"init.rename": ("x",)})
    with pytest.raises(ValueError, match=r"init.rename has .* cannot replace '\^embed': invalid group reference 1"):
        adapted(tiny, base, {"init.rename": (("^embed", r"\1x"),)})


def test_new_parameters_must_be_trained(tiny, base):
    """Check that an adapter freezes no parameters that the other model does not have."""
    changes = {"adapter.name": "lora", "adapter.rank": 2, "init.skip": ("^norm/",)}
    message = r"adapter\.trained is \(\): .* such as \('\^norm/',\)\.$"
    with pytest.raises(ValueError, match=message):
        adapted(tiny, base, changes)
    with pytest.raises(ValueError, match=message):  # before the data are opened
        pretrained.check(Experiment(tiny("gpt", SMALL | {"init.path": str(base)} | changes), **ONE))
    _, state = adapted(tiny, base, changes | {"adapter.trained": ("^norm/scale", "^norm/bias")})
    assert set(state.params["norm"]) == {"scale", "bias"}


def test_changed_metadata_of_the_other_model_raise(tiny, base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    experiment = Experiment(tiny("gpt", SMALL | {"init.path": str(tmp_path / "base")}), **ONE)
    pretrained.check(experiment)
    path = tmp_path / "base" / "facts.json"
    replace(Facts.load(path), begin_token=3).save(path)
    with pytest.raises(ValueError, match=f"^{path} is not that of the newest checkpoint"):
        pretrained.check(experiment)
    pretrained.check(experiment, force=True)


@pytest.mark.parametrize(("old", "new", "key"), [("1e-05", "1e-07", "model.epsilon"), ("0.0", "0.5", "model.dropout")])
def test_changed_config_of_the_other_model_raises(old, new, key, base, tmp_path):
    """Check a digit that changes no shape of a parameter, in the model that a run starts from."""
    path = shutil.copytree(base, tmp_path / "base") / "config.json"
    adoption.model_of(str(path.parent))
    head, model, rest = path.read_text().partition('"model": {')
    name = key.removeprefix("model.")
    path.write_text(head + model + rest.replace(f'"{name}": {old}', f'"{name}": {new}', 1))
    with pytest.raises(ValueError, match=rf"^{path} is not the config of the newest checkpoint \({key}\): restore it"):
        adoption.model_of(str(path.parent))


def test_all_stacks_have_the_layers_that_are_copied(tiny, tmp_path):
    """Check that the depths of the encoder and of the decoder follow from `init.layers`, unless they are set."""
    model = BART(depth=3, decoder_depth=4, width=8, num_heads=2, vocab_size=9, max_length=4)
    tokens = jnp.ones((1, 2), int)
    convert.save(tmp_path, model, model.init(jax.random.key(0), tokens, tokens))
    for typed, expected in (((), (2, 2)), (("model.decoder_depth",), (2, 1))):
        changes = {"model.name": "bart", "model.decoder_depth": 1, "init.layers": (0, 2)}
        config = tiny("transformer", changes)
        config.init.path = str(tmp_path)
        adoption.adopt(config, typed)
        assert (config.model.depth, config.model.decoder_depth) == expected


def test_incompatible_parameters_raise_before_allocation(tiny, base):
    experiment = Experiment(tiny("gpt", SMALL | {"model.width": 32, "init.path": str(base)}), **ONE)
    with pytest.raises(ValueError, match=r"change the model, or add them to init\.skip"):
        pretrained.start_from(
            experiment.abstract_state, experiment.model, experiment.run.init, lambda: pytest.fail("made")
        )
    with pytest.raises(
        ValueError, match=r"adapter\.name is 'lora' and init\.path is empty: it must name the model to adapt"
    ):
        Experiment(tiny("gpt", {"adapter.name": "lora"}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("table/row", (4, 6), (6, 6)),
        ("backbone/table/column", (6, 6), (4, 6)),
        ("stacks_0/layers/attention/attention/relative/table", (2, 9, 3), (2, 25, 3)),
    ],
)
def test_position_tables_are_resampled(path, old, new):
    """Check tables of rows and columns and the relative tables of Swin against `resample`."""
    line = np.arange(np.prod(old[-2:]), dtype=np.float32).reshape(old[-2:])
    theirs = np.broadcast_to(line, old)
    state = TrainState(jnp.int32(0), unflat({path: jnp.zeros(new)}), None, {}, None)
    with pytest.MonkeyPatch.context() as patch:
        model = Swin() if path.startswith("stacks") else ViT()
        patch.setattr(pretrained.convert, "load", lambda *_, **__: (model, {"params": unflat({path: theirs})}))
        actual = flat(pretrained.start_from(state, model, Init())[0].params)[path]
    side = int(np.sqrt(old[1])), int(np.sqrt(new[1]))
    grids = [(side[0], side[0]), (side[1], side[1])] if len(old) > 2 else [(old[0], 1), (new[0], 1)]
    expected = resample(jnp.asarray(line), *grids)
    np.testing.assert_allclose(actual, np.broadcast_to(expected, new), atol=1e-5)


def unflat(tree):
    ((path, value),) = tree.items()
    for name in reversed(path.split("/")):
        value = {name: value}
    return value
