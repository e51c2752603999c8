"""Text generation with the options of a config: the room that the model and its helpers leave for new tokens."""

import jax
import pytest

from lineage.data import Loader
from lineage.evaluation.sampling import Sampler
from lineage.train.experiment import Experiment


@pytest.mark.parametrize("role", ["draft", "contrast"])
def test_helper_with_a_short_context(role, tiny):
    """Check prompts that fit into the 16 tokens of the model, and some of them also into the 12 of its helper."""
    best_of = 2 if role == "contrast" else 1
    changes = {"sampling.max_new_tokens": 8, "sampling.best_of": best_of, "sampling.prompt": "abcde"}
    context = Experiment(tiny("gpt", changes), devices=jax.devices()[:1]).context()
    sampler, loader = Sampler(context, {role: (context.model.clone(max_length=12), None)}), Loader(2)
    sampler.check_prompts(context.inputs(["abcd", "a"], loader))  # padded to 16 tokens
    limit = f"their sum must be at most the max_length of sampling.{role}, 12"
    with pytest.raises(ValueError, match=f"a prompt has 5 tokens and sampling.max_new_tokens is 8: .*{limit}"):
        sampler.check_prompts(context.inputs(["a", "abcde"], loader))
    with pytest.raises(ValueError, match=f"the prompt has 5 tokens, and 8 follow: {limit}"):
        sampler.check(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 3, "temperature": 0.0}, "best_of is 3 and .*temperature 0.0: the samples would be equal"),
        ({"num_beams": 2, "temperature": 1.0}, "num_beams is 2 and .*temperature 1.0: beam search does not sample"),
    ],
)
def test_options_that_do_not_fit_together(options, message, tiny):
    """Check that they are refused by commands and, before the first step, by runs that evaluate generated texts."""
    changes = {f"sampling.{key}": value for key, value in options.items()}
    experiment = Experiment(tiny("transformer", changes), devices=jax.devices()[:1])
    for check in (lambda: Sampler(experiment.context()), experiment.evaluation):
        with pytest.raises(ValueError, match=message):
            check()
