"""The probe: its queries and rows are those that attention works with, before and after rotation."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from experiments.anatomy import dissection
from vestige_jax import models
from vestige_jax.models.rope import Yarn

T, R, P = 12, 8, 4
IDS = np.arange(1, T + 1)
AT = np.array([3, 7, 11])


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def make(**changes) -> models.Decoder:
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, kv_lora_rank=R, v_head_dim=8)
    branch = dict(qk_nope_head_dim=8, qk_rope_head_dim=P)
    layers = dict(num_hidden_layers=2, full_attn_layers=(0, 1))
    config = models.ModelConfig(vocab_size=20, initializer_range=0.5, **sizes, **branch, **layers, **changes)
    return nnx.jit(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def nope():
    return make()


@pytest.fixture(scope="module")
def rope():
    """Stretched, with a rotated branch that is longer than the plain one."""
    yarn = Yarn(factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.5)
    return make(mla_use_nope=False, rope_theta=100.0, rope_scaling=yarn)


@pytest.mark.parametrize("arm", ["nope", "rope"])
def test_attention_over_its_rows_is_the_layers_output(arm, request):
    model = request.getfixturevalue(arm)
    seen = dissection.dissect(model, IDS, AT)
    assert seen.layers == (0, 1) and seen.rows.shape == (2, T, R + P) and seen.queries.shape == (2, 3, 2, R + P)
    for layer, rows, queries in zip(seen.layers, np.asarray(seen.rows), np.asarray(seen.queries), strict=True):
        wanted, up, out = outputs(model, layer)
        for at, query in zip(AT, queries, strict=True):
            weights = np.exp(seen.scale * query @ rows[: at + 1].T)
            latent = weights / weights.sum(-1, keepdims=True) @ rows[: at + 1, :R]
            heads = np.einsum("hr,rhv->hv", latent, up)
            assert_allclose(np.einsum("hv,hvd->d", heads, out), wanted[at], atol=2e-5)


def outputs(model, layer):
    """What the layer gives for IDS [T, D], W_UV [R, H, V] and W_O [H, V, D]."""
    block = model.layers[layer]
    run = nnx.jit(lambda m, ids: m.layers[layer].self_attn(m.layers[layer].input_layernorm(m.hidden(ids)[layer]))[0])
    attention = block.self_attn
    return run(model, jnp.asarray(IDS)[None]), np.asarray(attention.kv_b_proj[...])[..., 8:], attention.o_proj[...]


def test_without_rotation_plain_is_what_is_used(nope):
    seen = dissection.dissect(nope, IDS, AT)
    assert seen.plain_rows is seen.rows and seen.plain_queries is seen.queries
    rows, queries = seen.rotated()
    assert_array_equal(rows[..., :R], seen.rows[..., :R])
    assert_allclose(jnp.linalg.norm(rows, axis=-1), jnp.linalg.norm(seen.rows, axis=-1), rtol=1e-5)
    assert_allclose(rows[:, 0], seen.rows[:, 0])
    assert abs(rows - seen.rows).max() > 0.1 and abs(queries - seen.queries).max() > 0.1


def test_rotating_the_plain_ones_gives_what_a_rotated_model_uses(rope):
    seen = dissection.dissect(rope, IDS, AT)
    assert abs(seen.rows - seen.plain_rows).max() > 0.1
    for turned, used in zip(seen.rotated(), (seen.rows, seen.queries), strict=True):
        assert_allclose(turned, used, atol=1e-5)


def test_late_positions():
    assert_array_equal(dissection.late(8, 4), [4, 5, 6, 7])
    assert_array_equal(dissection.late(8, 2), [4, 6])
    assert_array_equal(dissection.late(9, 5), [4, 5, 6, 7, 8])
    for count in (0, 5):
        with pytest.raises(ValueError, match="queries=.*at most 4, half of length=8"):
            dissection.late(8, count)


@pytest.mark.parametrize(
    "ids, at, message",
    [
        (IDS[None], AT, "ids has shape"),
        (IDS * 1.0, AT, "dtype float64, expected integers"),
        (IDS + 9, AT, "the vocabulary has 20 entries"),
        (IDS, [T], "positions=.*0 to 11"),
        (IDS, [], "positions="),
    ],
)
def test_what_cannot_be_dissected(nope, ids, at, message):
    with pytest.raises(ValueError, match=message):
        dissection.dissect(nope, ids, at)


def test_a_model_without_rows():
    model = SimpleNamespace(layers=[SimpleNamespace(cached=False)])
    with pytest.raises(ValueError, match="no MLA layer"):
        dissection.dissect(model, IDS, AT)
