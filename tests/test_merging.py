"""Rows that stand for several: installing them, and how long they hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.caches import SPEC, filled, random_queries, random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

WIDE = dataclasses.replace(SPEC, merged=3, recall="none")
KEPT = np.arange(SPEC.archive_rows) < 2


def merge(spec, cache, **changes):
    batch = len(cache.fault)
    facts = dict(
        kept=jnp.tile(KEPT, (batch, 1)),
        value=jnp.ones((batch, spec.merged, spec.latent_dim)),
        key=jnp.ones((batch, spec.merged, spec.row_dim)),
        bias=jnp.zeros((batch, spec.merged)),
        count=jnp.full(batch, 2),
    )
    return vj.merge_rows(spec, cache, **facts | changes)


@pytest.fixture(scope="module")
def rows():
    return random_rows(0, 3, 20)


def test_a_row_with_bias_ln_m_is_m_rows(rows):
    cache = filled(WIDE, rows, np.array([16, 16, 16]))
    query, row = jnp.asarray(random_queries(1, 3)), random_rows(2, 3)
    one = merge(
        WIDE, cache, key=jnp.tile(row[:, None], (1, 3, 1)), value=jnp.tile(row[:, None, :6], (1, 3, 1)),
        bias=jnp.full((3, 3), np.log(3)), count=jnp.array([1, 1, 1]),
    )  # fmt: skip
    three = merge(
        WIDE, cache, key=jnp.tile(row[:, None], (1, 3, 1)), value=jnp.tile(row[:, None, :6], (1, 3, 1)),
        count=jnp.array([3, 3, 3]),
    )  # fmt: skip
    np.testing.assert_allclose(vj.attend(WIDE, one, query)[0], vj.attend(WIDE, three, query)[0], rtol=1e-5)
    none = vj.attend(WIDE, merge(WIDE, cache, count=jnp.array([0, 0, 0])), query)[0]
    plain = dataclasses.replace(SPEC, recall="none")
    kept = vj.keep_set(plain, filled(plain, rows, np.array([16, 16, 16])), jnp.tile(KEPT, (3, 1)))
    np.testing.assert_array_equal(none, vj.attend(plain, kept, query)[0])


def test_rows_behind_the_count_mean_nothing(rows):
    cache = filled(WIDE, rows)
    odd = dict(value=jnp.ones((3, 3, 6)).at[:, 2].set(jnp.nan), key=jnp.ones((3, 3, 10)).at[:, 2].set(jnp.nan))
    query = jnp.asarray(random_queries(1, 3))
    np.testing.assert_array_equal(
        vj.attend(WIDE, merge(WIDE, cache, **odd), query)[0], vj.attend(WIDE, merge(WIDE, cache), query)[0]
    )


def test_merged_rows_hold_until_a_block_closes(rows):
    cache = merge(WIDE, filled(WIDE, rows, np.array([20, 20, 16])))
    longer = vj.append(WIDE, cache, jnp.asarray(rows[:, :4]))
    assert longer.merged.count.tolist() == [0, 0, 2]  # the first two are at 24, a whole block
    again = vj.close(WIDE, cache)
    assert again.merged.count.tolist() == [0, 0, 0]
    np.testing.assert_array_equal(again.archive.kept, filled(WIDE, rows, np.array([20, 20, 16])).archive.kept)


def test_no_room_for_merged_rows_is_the_default(rows):
    cache = filled(SPEC, rows)
    assert cache.merged is None and len(jax.tree.leaves(cache)) == len(jax.tree.leaves(filled(WIDE, rows))) - 2
    with pytest.raises(ValueError, match="merged=0 leaves no room"):
        merge(SPEC, cache)


def test_misshaped_rows_are_refused(rows):
    cache = filled(WIDE, rows)
    with pytest.raises(ValueError, match=r"key has shape .*expected.*\[B, W, C\]"):
        merge(WIDE, cache, key=jnp.ones((3, 3, 9)))
    with pytest.raises(ValueError, match="merged=-1"):
        dataclasses.replace(SPEC, merged=-1)


def test_a_cache_grows_into_a_roomier_spec(rows):
    small, roomy = SPEC, dataclasses.replace(SPEC, capacity=64, ratio=0.5)
    cache = filled(small, rows)
    grown = vj.grow(roomy, cache)
    query = jnp.asarray(random_queries(1, 3))
    none = [dataclasses.replace(spec, recall="none") for spec in (small, roomy)]
    np.testing.assert_allclose(vj.attend(none[0], cache, query)[0], vj.attend(none[1], grown, query)[0], atol=1e-6)
    more = random_rows(3, 3, 7)
    before, after = vj.append(small, cache, more), vj.append(roomy, grown, more)
    np.testing.assert_array_equal(vj.where(small, before) > 0, (vj.where(roomy, after) > 0)[:, : small.capacity])
    np.testing.assert_array_equal(before.archive.rows, after.archive.rows[:, : small.archive_rows])
    with pytest.raises(ValueError, match=r"cache.*more than"):
        vj.grow(small, grown)
