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
    parameters. Those of its buffers are zero.
    """

    def collect(reference):
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(parameter.grad)
            for buffer in filter(torch.is_floating_point, reference.buffers()):
                buffer.zero_()
        return ours(reference)[1]["params"]

    return collect


@pytest.fixture
def exported(tmp_path):
    """Return a function that writes a model, and reads it as one of ours, which must be equal, and as a reference.

    The reference's tensors must be those of another one, `like`, except the `missing` ones, which are not written.
    """

    def read(model, variables, cls, like=None, missing=frozenset()):
        folder = tmp_path / "exported"
        convert.save(folder, model, variables)
        config, weights = folder / "config.json", folder / "model.safetensors"
        assert weights.stat().st_mode == config.stat().st_mode  # others may read both
        again, restored = convert.load(folder)
        assert again == model
        jax.tree.map(np.testing.assert_array_equal, restored, variables)
        reference, info = cls.from_pretrained(folder, output_loading_info=True)
        assert info.pop("missing_keys") == missing
        assert not any(info.values())
        for name, expected in like.state_dict().items() if like else ():
            if name not in missing:
                np.testing.assert_array_equal(reference.state_dict()[name], expected, err_msg=name)
        return reference.eval()

    return read


@pytest.fixture
def round_trip(exported):
    """Return a function that exports a model with random variables, and returns its output and the reference's.

    Inputs are named as the reference's. Variables have the mean `center`, and are positive where it is not 0.
    """

    def run(model, cls, center=0.0, **inputs):
        rng, arguments = np.random.default_rng(3), {name: tensor_of(value) for name, value in inputs.items()}
        shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs.values())
        variables = jax.tree.map(lambda x: np.float32(0.2 * rng.standard_normal(x.shape)), shapes)
        variables = jax.tree.map(lambda x: abs(x) + center, variables) if center else variables
        reference = exported(model, variables, cls)
        with torch.no_grad():
            return jax.jit(model.apply)(variables, *inputs.values()), reference(**arguments)

    return run


def tensor_of(array):
    """Return an array as PyTorch takes it: integers as int64, images with the channels first."""
    array = np.asarray(array)
    array = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
    return torch.tensor(array if array.dtype == np.float32 else array.astype(np.int64))


@pytest.fixture
def assert_same_gradients():
    def check(actual, expected, relative=1e-4):
        """Compare arrays relative to their largest entry, up to rounding: gradients of key biases are zero in
        exact arithmetic.
        """
        largest = max(jnp.abs(value).max() for value in jax.tree.leaves(expected))
        for (path, value), array in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
            allowed = relative * np.abs(value).max() + 1e-7 * largest
            np.testing.assert_allclose(array, value, rtol=0, atol=allowed, err_msg=jax.tree_util.keystr(path))

    return check


@pytest.fixture
def assert_same_encoder(gradients, assert_same_gradients):
    """Return a function that compares outputs and hidden states of real tokens, and gradients if a reference is given.

    It returns our outputs.
    """

    def check(model, variables, batch, outputs, hidden, reference=None):
        mask, rng = np.array(batch["mask"]), np.random.default_rng(0)
        arguments = jax.tree.map(jnp.asarray, batch)
        weights = [rng.standard_normal(out.shape).astype(np.float32) for out in outputs]

        def real(array):
            return array[mask] if array.shape[: mask.ndim] == mask.shape else array

        def loss(params):
            out, state = model.apply({"params": params}, **arguments, mutable=["intermediates"])
            out = out if isinstance(out, tuple) else (out,)
            total = sum(real(jnp.tanh(a) * w).sum() for a, w in zip(out, weights, strict=True))
            return total, (out, state["intermediates"])

        if reference is None:
            _, (results, sown) = jax.jit(loss)(variables["params"])
        else:
            sum(real(a.tanh() * torch.tensor(w)).sum() for a, w in zip(outputs, weights)).backward()
            grads, (results, sown) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
        for actual, expected in zip(results, outputs, strict=True):
            assert_close(real(actual), real(expected.detach().numpy()))
        stack = sown["stack"]
        stacks = [stack] if "layers" in stack else [stack[name] for name in sorted(stack)]
        layers = [sown["embedding"][0], *(layer for stack in stacks for layer in stack["layers"]["hidden"][0])]
        rows = mask.reshape(-1, mask.shape[-1])
        for actual, expected in zip(layers, hidden, strict=True):
            actual = np.asarray(actual).reshape(*rows.shape, -1)
            assert_close(actual[rows], expected.detach().numpy()[:, : rows.shape[1]][rows])
        if reference is not None:
            assert_same_gradients(grads, gradients(reference))
        return results

    return check


@pytest.fixture
def watched():
    """Return a function that gives a list to which a reference appends the input of its first block, and all outputs
    of its blocks.
    """

    def watch(blocks):
        states = []
        blocks[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for block in blocks:
            block.register_forward_hook(lambda _, args, out: states.append(out[0] if isinstance(out, tuple) else out))
        return states

    return watch


@pytest.fixture
def assert_same_language_model(ours, gradients, assert_same_gradients, watched):
    """Return a function that compares hidden states, logits, loss and gradients, and returns the model and its states.

    It takes the reference and its inputs, our inputs and masks, the tokens whose successors are predicted with their
    mask, and the blocks and the mask of each stack by the prefix of its names.
    """

    def check(reference, arguments, inputs, masks, tokens, mask, stacks):
        model, variables = ours(reference)
        expected = {prefix: watched(blocks) for prefix, (blocks, _) in stacks.items()}
        logits = reference(**{name: tensor_of(value) for name, value in arguments.items()}, use_cache=False).logits
        targets = np.roll(tokens, -1, axis=1)
        expected_loss = torch.nn.functional.cross_entropy(logits[torch.tensor(mask)], torch.tensor(targets)[mask])
        expected_loss.backward()

        def loss(params):
            args, named = jax.tree.map(jnp.asarray, (inputs, masks))
            out, state = model.apply({"params": params}, *args, **named, mutable=["intermediates"])
            losses = optax.softmax_cross_entropy_with_integer_labels(out, targets)
            return (losses * mask).sum() / mask.sum(), (out, state["intermediates"])

        (value, (out, sown)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
        assert_close(out[mask], logits.detach().numpy()[mask])
        states = {
            prefix: [sown[f"{prefix}embedding"][0], *sown[f"{prefix}stack"]["layers"]["hidden"][0]] for prefix in stacks
        }
        for prefix, (_, real) in stacks.items():
            for actual, hidden in zip(states[prefix], expected[prefix], strict=True):
                assert_close(actual[real], hidden.detach().numpy()[real])
        np.testing.assert_allclose(value, expected_loss.item(), rtol=1e-5)
        assert_same_gradients(grads, gradients(reference))
        return model, variables, states

    return check


@pytest.fixture
def assert_same_decoder(assert_same_language_model):
    """Return a function that compares a language model with a reference, see `assert_same_language_model`.

    The reference has these blocks and this final norm. There are sequences of the given length without padding, with
    padding on the left, and with padding on the right.
    """

    def check(reference, blocks, norm, length, seed):
        rng = np.random.default_rng(seed + 100)
        tokens, mask = _padded(rng, reference.config.vocab_size, [(0, length), (4, length - 4), (0, length // 3)])
        positions, last = np.maximum(mask.cumsum(axis=1) - 1, 0), []
        norm.register_forward_hook(lambda _, args, out: last.append(out))
        arguments = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        named = {"mask": mask, "positions": positions}
        model, variables, states = assert_same_language_model(
            reference, arguments, (tokens,), named, tokens, mask, {"": (blocks, mask)}
        )
        assert_close(model.bind(variables).norm(states[""][-1])[mask], last[0].detach().numpy()[mask])
        return model

    return check


@pytest.fixture
def assert_same_encoder_decoder(assert_same_language_model):
    """Return a function that compares an encoder-decoder on padded sequences, see `assert_same_language_model`.

    The reference has these blocks; tokens are at least `lowest`.
    """

    def check(reference, encoder_blocks, decoder_blocks, seed, lowest=0):
        rng, size = np.random.default_rng(seed + 100), reference.config.vocab_size
        inputs, inputs_mask = _padded(rng, size, [(0, 12), (4, 7), (0, 5)], lowest)
        tokens, mask = _padded(rng, size, [(0, 11), (0, 4), (2, 5)], lowest)
        arguments = {"input_ids": inputs, "attention_mask": inputs_mask}
        arguments |= {"decoder_input_ids": tokens, "decoder_attention_mask": mask}
        named = {"inputs_mask": inputs_mask, "mask": mask}
        stacks = {"encoder_": (encoder_blocks, inputs_mask), "decoder_": (decoder_blocks, mask)}
        assert_same_language_model(reference, arguments, (inputs, tokens), named, tokens, mask, stacks)

    return check


def _padded(rng, vocab_size, rows, lowest=0):
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
        written, settings = [], options.copy()
        if "forced_first_token" in options:
            settings["forced_bos_token_id"] = settings.pop("forced_first_token")
        settings["bad_words_ids"] = [[token] for token in settings.pop("excluded_tokens", ())] or None
        for seed in seeds:
            rng = np.random.default_rng(seed)
            inputs, mask = _padded(rng, reference.config.vocab_size, [(0, 9), (3, 6), (0, 4), (0, 1)], lowest)
            with torch.no_grad():
                expected = reference.generate(
                    torch.tensor(inputs), attention_mask=torch.tensor(mask).long(), max_new_tokens=new,
                    decoder_start_token_id=start, eos_token_id=list(stop_tokens) or None, pad_token_id=1,
                    do_sample=False, output_scores=True, return_dict_in_generate=True, **settings,
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
