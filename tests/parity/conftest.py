"""Fixtures of the parity tests: references with random weights, and their converted weights and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from lineage.models import convert
from lineage.models.decoding.generate import generate
from tests.tolerance import assert_close

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def randomize():
    """Return a function that fills every parameter with random values, including those initialized to ones or zeros."""

    def fill(reference, seed, scale=0.15):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                center = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
                parameter.copy_(center + scale * torch.randn(parameter.shape, generator=generator))
        return reference.eval()

    return fill


@pytest.fixture
def ours(tmp_path):
    """Return a function that saves a reference and loads it as a model and variables of this project."""

    def load(reference, **settings):
        reference.save_pretrained(tmp_path / "reference")
        return convert.load(tmp_path / "reference", **settings)

    return load


@pytest.fixture
def gradients(ours):
    """Return a function that converts the gradients of a reference, by saving and loading them in place of its
    parameters.
    """

    def collect(reference):
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(parameter.grad)
        return ours(reference)[1]["params"]

    return collect


@pytest.fixture
def assert_same_gradients():
    def check(found, expected, relative=1e-4):
        """Compare arrays relative to their largest entry, up to rounding: gradients of key biases are zero in
        exact arithmetic.
        """
        largest = max(jnp.abs(value).max() for value in jax.tree.leaves(expected))
        for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
            allowed = relative * np.abs(value).max() + 1e-7 * largest
            np.testing.assert_allclose(other, value, rtol=0, atol=allowed, err_msg=jax.tree_util.keystr(path))

    return check


@pytest.fixture
def assert_same_encoder_decoder(ours, gradients, assert_same_gradients):
    """Return a function that compares an encoder-decoder with a reference on padded sequences.

    Hidden states after the given blocks of the reference, logits, loss and gradients are compared; tokens are at least
    `lowest`.
    """

    def check(reference, encoder_blocks, decoder_blocks, seed, lowest=0):
        rng = np.random.default_rng(seed + 100)
        model, variables = ours(reference)
        inputs, mask = _padded(rng, reference.config.vocab_size, [(0, 12), (4, 7), (0, 5)], lowest)
        tokens, tokens_mask = _padded(rng, reference.config.vocab_size, [(0, 11), (0, 4), (2, 5)], lowest)
        targets = np.roll(tokens, -1, axis=1)

        expected = {"encoder": [], "decoder": []}
        for side, blocks in (("encoder", encoder_blocks), ("decoder", decoder_blocks)):
            blocks[0].register_forward_pre_hook(lambda _, args, side=side: expected[side].append(args[0]))
            for block in blocks:
                block.register_forward_hook(
                    lambda _, args, out, side=side: expected[side].append(out[0] if isinstance(out, tuple) else out)
                )
        logits = reference(
            input_ids=torch.tensor(inputs), attention_mask=torch.tensor(mask).long(),
            decoder_input_ids=torch.tensor(tokens), decoder_attention_mask=torch.tensor(tokens_mask).long(),
            use_cache=False,
        ).logits  # fmt: skip
        valid = torch.tensor(tokens_mask)
        expected_loss = torch.nn.functional.cross_entropy(logits[valid], torch.tensor(targets)[valid])
        expected_loss.backward()

        def loss(params):
            args, masks = jax.tree.map(jnp.asarray, ((inputs, tokens), {"inputs_mask": mask, "mask": tokens_mask}))
            out, state = model.apply({"params": params}, *args, **masks, mutable=["intermediates"])
            losses = optax.softmax_cross_entropy_with_integer_labels(out, targets)
            return (losses * tokens_mask).sum() / tokens_mask.sum(), (out, state["intermediates"])

        quick = {"xla_backend_optimization_level": 0}  # compilation dominates
        step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=quick)
        (value, (out, seen)), grads = step(variables["params"])
        assert_close(out[tokens_mask], logits.detach().numpy()[tokens_mask])
        for side, real in (("encoder", mask), ("decoder", tokens_mask)):
            hidden = [seen[f"{side}_embedding"][0], *seen[f"{side}_stack"]["layers"]["hidden"][0]]
            assert len(hidden) == len(expected[side])
            for mine, theirs in zip(hidden, expected[side]):
                assert_close(mine[real], theirs.detach().numpy()[real])
        np.testing.assert_allclose(value, expected_loss.item(), rtol=1e-5)
        assert_same_gradients(grads, gradients(reference))

    return check


def _padded(rng, vocab_size, rows, lowest):
    """Return random tokens, and a mask of the given (start, length) of each row."""
    starts, lengths = np.array(rows).T[..., None]
    places = np.arange((starts + lengths).max())
    tokens = rng.integers(lowest, vocab_size, (len(rows), len(places)))
    return tokens, (places >= starts) & (places < starts + lengths)


@pytest.fixture
def assert_same_generation(ours):
    """Return a function that compares generated tokens with those of a reference and returns them by sequence."""

    def check(reference, start, stop_tokens=(), new=12, seeds=range(4), lowest=0, **options):
        model, variables = ours(reference)
        written, theirs = [], options.copy()
        if "forced_first_token" in options:
            theirs["forced_bos_token_id"] = theirs.pop("forced_first_token")
        for seed in seeds:
            rng = np.random.default_rng(seed)
            inputs, mask = _padded(rng, reference.config.vocab_size, [(0, 9), (3, 6), (0, 4), (0, 1)], lowest)
            with torch.no_grad():
                expected = reference.generate(
                    torch.tensor(inputs), attention_mask=torch.tensor(mask).long(), max_new_tokens=new,
                    decoder_start_token_id=start, eos_token_id=list(stop_tokens) or None, pad_token_id=1,
                    do_sample=False, output_scores=True, return_dict_in_generate=True, **theirs,
                )  # fmt: skip
            out = generate(
                model, variables, np.full((len(inputs), 1), start), inputs=(inputs.astype(np.int32), mask),
                max_new_tokens=new, temperature=0.0, stop_tokens=stop_tokens, pad_token=1, **options,
            )  # fmt: skip
            tokens = expected.sequences.numpy()
            np.testing.assert_array_equal(out.tokens[:, : tokens.shape[1]], tokens)
            assert (out.tokens[:, tokens.shape[1] :] == 1).all()
            if "num_beams" in options:
                np.testing.assert_allclose(out.scores, expected.sequences_scores.numpy(), rtol=1e-4, atol=1e-5)
            written += [row[1:length].tolist() for row, length in zip(out.tokens, out.lengths)]
        return written

    return check
