import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lineage.models.kernels.compiler import rotated_by_product
from lineage.models.layers.position import (
    Learned2D,
    RelativeBuckets,
    RelativeKeys,
    resample,
    rotary,
    sincos_2d,
    sinusoidal,
    stretched,
    yarn_magnitude,
)


def test_sinusoidal_matches_the_formula():
    table = sinusoidal(7, 10)
    for position in range(7):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            assert table[position, 2 * i] == pytest.approx(np.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1] == pytest.approx(np.cos(angle), abs=1e-6)


@pytest.mark.parametrize("endpoint", [False, True])
def test_sincos_2d_matches_the_formula(endpoint):
    table = sincos_2d(3, 4, 12, endpoint=endpoint).reshape(3, 4, 4, 3)
    for row in range(3):
        for column in range(4):
            for i in range(3):
                frequency = 1 / 10_000 ** (i / (2 if endpoint else 3))
                expected = [f(place * frequency) for place in (column, row) for f in (np.sin, np.cos)]
                np.testing.assert_allclose(table[row, column, :, i], expected, atol=1e-6)


def test_sizes_that_do_not_divide_into_sines_and_cosines_raise():
    with pytest.raises(ValueError, match="multiple of 4, not 10"):
        sincos_2d(2, 2, 10)
    with pytest.raises(ValueError, match="heads of an even size, not 3"):
        rotary(jnp.zeros((1, 2, 1, 3)), jnp.arange(2)[None])


def test_rotary_rotates_pairs_by_their_angles(normal):
    x, positions = normal(2, 5, 3, 8), jnp.array([[0, 1, 2, 5, 9], [7, 3, 0, 1, 1]])
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    angles = np.asarray(positions)[:, :, None, None] / 10_000 ** (np.arange(4) / 4)
    turned = pairs * np.exp(1j * angles)
    np.testing.assert_allclose(rotary(x, positions), np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


def test_rotary_on_a_tpu_is_a_product_with_a_matrix(normal):
    x, positions = normal(2, 128, 3, 8).astype(jnp.bfloat16), jnp.arange(128)[None]
    angles = positions[:, :, None, None] / 10_000 ** (np.arange(4) / 4)
    turned, upstream = rotary(x, positions), normal(*x.shape).astype(jnp.bfloat16)
    by_product, backward = jax.vjp(lambda x: rotated_by_product(x, jnp.sin(angles), jnp.cos(angles)), x)
    np.testing.assert_array_equal(by_product.astype(jnp.float32), turned.astype(jnp.float32))
    gradient = jax.vjp(lambda x: rotary(x, positions), x)[1](upstream)[0]
    np.testing.assert_allclose(backward(upstream)[0].astype(jnp.float32), gradient.astype(jnp.float32), atol=0.03)

    def on_tpu(x):
        return jax.jit(rotary).trace(x, positions[:, : x.shape[1]]).lower(lowering_platforms=("tpu",)).as_text()

    assert "dot_general" in on_tpu(x)
    assert "dot_general" not in on_tpu(x[:, :100]) + on_tpu(x.astype(jnp.float32))


def test_rotary_scores_depend_on_distance_only(normal):
    query, key = normal(1, 1, 1, 16), normal(1, 1, 1, 16)

    def product(query_position, key_position):
        places = jnp.array([[query_position]]), jnp.array([[key_position]])
        return (rotary(query, places[0]) * rotary(key, places[1])).sum().item()

    assert product(7, 4) == pytest.approx(product(103, 100), abs=1e-4)
    assert abs(product(7, 4) - product(7, 5)) > 1e-2


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_frequencies(kind, normal):
    """Check that low frequencies are divided by the factor, high frequencies are kept, and others are interpolated."""
    frequencies = 10_000.0 ** -(np.arange(32) / 32)
    turns = 4096 * frequencies / (2 * np.pi)
    ratio = frequencies / stretched(frequencies, 10_000.0, kind, factor=8.0, length=4096, turns=(2.0, 16.0))
    assert (np.diff(ratio) >= 0).all()
    if kind == "linear":
        np.testing.assert_allclose(ratio, 8.0)
    else:
        # The ramp of YaRN ends at integer indices.
        slack = 10_000 ** (1 / 32) if kind == "yarn" else 1.0
        np.testing.assert_allclose(ratio[turns < 2 / slack], 8.0)
        np.testing.assert_allclose(ratio[turns > 16 * slack], 1.0)
        between = ratio[(turns > 2) & (turns < 16)]
        assert len(between) > 3
        assert ((between > 1) & (between < 8)).all()
    if kind == "llama3":
        kept = (turns - 2) / 14
        np.testing.assert_allclose(1 / ratio, np.clip(kept + (1 - kept) / 8, 1 / 8, 1))


def test_rotary_with_other_frequencies_and_a_magnitude(normal):
    """Check that doubled positions with halved frequencies give the same angles."""
    x, positions = normal(2, 5, 3, 8), jnp.arange(5)[None]
    halved = rotary(x, 2 * positions, scaling=lambda frequencies, base: frequencies / 2, magnitude=3.0)
    np.testing.assert_allclose(halved, 3 * rotary(x, positions), atol=1e-5)
    assert yarn_magnitude(1.0) == 1.0


def test_learned_2d_concatenates_row_and_column_embeddings(variables):
    module = Learned2D(2, 3, 7)
    params = variables(module)
    table = module.apply(params).reshape(2, 3, 7)
    for row in range(2):
        for column in range(3):
            np.testing.assert_array_equal(table[row, column, :3], params["params"]["row"][row])
            np.testing.assert_array_equal(table[row, column, 3:], params["params"]["column"][column])


def test_relative_keys_use_the_clipped_distance(variables, normal):
    query, positions = normal(2, 3, 2, 4), jnp.array([[0, 1, 4], [5, 0, 2]])
    module = RelativeKeys(max_distance=2)
    params = variables(module, query, positions, keys=6)
    bias = np.asarray(module.apply(params, query, positions, 6))
    query, table = np.asarray(query), np.asarray(params["params"]["table"])
    assert bias.shape == (2, 2, 3, 6)
    for batch, head, place, key in np.ndindex(bias.shape):
        distance = np.clip(int(positions[batch, place]) - key, -2, 2)
        expected = query[batch, place, head] @ table[distance + 2] / 2
        assert bias[batch, head, place, key] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 7)), ((7, 5), (3, 9)), ((8, 8), (3, 2)), ((2, 2), (2, 5))])
def test_resample_is_bicubic(old, new, normal):
    torch = pytest.importorskip("torch")
    table = normal(old[0] * old[1], 3)
    grid = torch.tensor(np.asarray(table).reshape(*old, 3).transpose(2, 0, 1)[None])
    expected = torch.nn.functional.interpolate(grid, size=new, mode="bicubic")[0]
    expected = expected.numpy().transpose(1, 2, 0).reshape(-1, 3)
    np.testing.assert_allclose(resample(table, old, new), expected, atol=2e-6)


def test_resample_checks_the_grid(normal):
    with pytest.raises(ValueError, match="a table of 7 positions is not one of a 2x3 grid"):
        resample(normal(7, 2), (2, 3), (4, 4))


def test_positions_keep_bfloat16(normal):
    x = normal(1, 3, 2, 4).astype(jnp.bfloat16)
    assert rotary(x, jnp.arange(3)[None]).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda t: resample(t, (2, 2), (3, 3)), x.reshape(-1, 6)[:4]).dtype == jnp.bfloat16


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_match_the_paper(bidirectional, variables):
    """Check that short distances have separate buckets, long ones share buckets, and directions are separate if
    bidirectional.
    """
    module = RelativeBuckets(2, buckets=8, max_distance=20, bidirectional=bidirectional)
    positions = jnp.array([[50, 51], [3, 70]])
    params = variables(module, positions, keys=80)
    bias, table = module.apply(params, positions, 80), params["params"]["table"]
    assert bias.shape == (2, 2, 2, 80)
    one = [0, 1, 2, 2, 2, 2, 2, 3] if bidirectional else [0, 1, 2, 3, 4, 4, 5, 5]  # buckets of the distances 0, 1, ...
    for batch, query in np.ndindex(2, 2):
        place = int(positions[batch, query])
        for distance in range(min(8, place)):
            np.testing.assert_array_equal(bias[batch, :, query, place - distance], table[one[distance]])
            after = one[distance] + 4 if bidirectional and distance else 0
            np.testing.assert_array_equal(bias[batch, :, query, place + distance], table[after])
    np.testing.assert_array_equal(bias[0, :, 0, :31].T, jnp.tile(table[3 if bidirectional else 7], (31, 1)))


@pytest.mark.parametrize(("buckets", "alone"), [(8, 4), (1, 0)])
def test_relative_buckets_exceeding_the_distance_raise(buckets, alone):
    module = RelativeBuckets(1, buckets, max_distance=4, bidirectional=False)
    with pytest.raises(ValueError, match=f"with {buckets} buckets, {alone} distances have a .* max_distance, which is"):
        module.init(jax.random.key(0), jnp.array([[0]]), 3)


def test_relative_buckets_in_bfloat16(variables):
    module = RelativeBuckets(2)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables(module, jnp.array([[0]]), keys=3))
    assert module.apply(params, jnp.array([[0]]), 3).dtype == jnp.bfloat16
