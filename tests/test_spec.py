"""CacheSpec: the numbers of the method, and the bytes of a cache before it is allocated."""

import dataclasses
import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.caches import SHAPE, SPEC

KIMI = vj.CacheSpec(512, 64, 32, 192**-0.5, 20_000)


def small(**changes):
    return vj.CacheSpec(**(SHAPE | dict(block=8, rank=3) | changes))


def test_the_defaults_are_those_of_the_paper():
    assert (KIMI.block, KIMI.sinks, KIMI.rank, KIMI.fetch) == (4096, 4, 64, 4096)
    assert (KIMI.recall_target, KIMI.z_max, KIMI.activation) == (0.9, 8.0, 0)
    assert (KIMI.overflow, KIMI.index, KIMI.bound) == ("dense", "sketch", "calibrated")
    assert KIMI.dtype == jnp.bfloat16
    assert KIMI.lowpass_bins == 16
    assert KIMI.row_dim == 576


def test_the_archive_holds_the_whole_blocks_of_the_capacity():
    assert KIMI.archive_rows == 4 * 4096
    assert small(capacity=40).archive_rows == 40
    assert small(capacity=47).archive_rows == 40
    assert small(capacity=7).archive_rows == 0


def test_m_is_the_ratio_of_closed_rows_rounded_half_up_and_at_least_one():
    assert [KIMI.keep_count(n) for n in (0, 15, 47, 48, 4096, 16384)] == [1, 1, 1, 2, 128, 512]
    assert [small(ratio=0.25).keep_count(n) for n in (8, 9, 10, 40)] == [2, 2, 3, 10]
    assert small(ratio=1.0).keep_count(40) == 40


def test_a_budget_is_m_itself():
    assert [small(budget=5).keep_count(n) for n in (0, 8, 40)] == [5, 5, 5]


def test_tier_1_is_m_of_the_full_archive_and_the_sinks():
    assert KIMI.tier1_rows == 512 + 4
    assert small(ratio=0.25, sinks=2).tier1_rows == 10 + 2
    assert small(budget=5, sinks=0).tier1_rows == 5


def test_an_explicit_kappa_wins():
    assert small(kappa=3).lowpass_bins == 3


def test_the_conformal_level_is_exactly_18_of_19():
    assert KIMI.coverage == fractions.Fraction(18, 19)
    assert KIMI.gate_quantile == pytest.approx(0.05)


def test_equal_specs_are_one_static_argument():
    """However the dtype is spelled; otherwise jit would compile twice."""
    spellings = [small(dtype=d, sketch_dtype=s) for d, s in [(jnp.bfloat16, jnp.float16), ("bfloat16", "float16")]]
    assert len({hash(s) for s in spellings}) == 1 and spellings[0] == spellings[1]


def test_a_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.rank = 2


def test_a_replaced_field_is_validated_again():
    with pytest.raises(ValueError, match="rank=7"):
        dataclasses.replace(SPEC, rank=7)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(dtype=jnp.float32, sketch_dtype=jnp.float32),
        dict(bound="sound"),
        dict(calibration="decode"),
        dict(calibration="decode", bound="sound", budget=3, sinks=0, capacity=45),
        dict(rank=0),
        dict(rank=6),
        dict(capacity=5),
        dict(budget=50),
    ],
    ids=str,
)
def test_nbytes_are_the_bytes_of_the_arrays(changes):
    spec = small(**changes)
    cache = jax.eval_shape(lambda: vj.init(spec, 3))

    def size(part):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part))

    parts = {field.name: size(getattr(cache, field.name)) for field in dataclasses.fields(cache)}
    assert spec.nbytes(3) == parts | {"total": size(cache)}


def test_an_archived_row_is_indexed_in_260_bytes():
    """Branch in place (128), 64 sketch numbers (128) and eta (4), against 1152 for the row (§3)."""
    spec = dataclasses.replace(KIMI, sketch_dtype=jnp.float16)
    index = spec.nbytes(1)["index"] - 4 * 512 * 64  # without the basis
    branch = spec.archive_rows * 64 * 2
    assert (index + branch) / spec.archive_rows == 260
    assert spec.row_dim * spec.dtype.itemsize == 1152


def test_nbytes_allocate_nothing():
    terabytes = vj.CacheSpec(512, 64, 32, 0.1, 2**30).nbytes(8)
    assert terabytes["archive"] > 8 * 2**40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(latent_dim=0), r"latent_dim=0.*>= 1"),
        (dict(branch_dim=-4), r"branch_dim=-4.*>= 1"),
        (dict(num_heads=2.0), r"num_heads=2\.0.*integer"),
        (dict(capacity=0), r"capacity=0.*>= 1"),
        (dict(block=True), r"block=True.*integer"),
        (dict(fetch=0), r"fetch=0.*>= 1"),
        (dict(sinks=-1), r"sinks=-1.*>= 0"),
        (dict(activation=-1), r"activation=-1.*>= 0"),
        (dict(scale="x"), r"scale='x'.*positive finite"),
        (dict(ratio="1/32"), r"ratio='1/32'.*\(0, 1\]"),
        (dict(recall_target=None), r"recall_target=None.*between 0 and 1"),
        (dict(stats="no"), r"stats='no'.*True or False"),
        (dict(budget=0), r"budget=0.*>= 1"),
        (dict(top_j=0), r"top_j=0.*>= 1"),
        (dict(kappa=0), r"kappa=0.*>= 1"),
        (dict(scale=0.0), r"scale=0\.0.*positive"),
        (dict(scale=float("nan")), r"scale=nan.*finite"),
        (dict(z_max=float("inf")), r"z_max=inf.*finite"),
        (dict(recall_target=1.0), r"recall_target=1\.0.*between 0 and 1"),
        (dict(rank=7), r"rank=7.*latent_dim=6"),
        (dict(rank=-1), r"rank=-1.*>= 0"),
        (dict(ratio=0.0), r"ratio=0\.0.*\(0, 1\]"),
        (dict(ratio=1.01), r"ratio=1\.01.*\(0, 1\]"),
        (dict(ratio=float("nan")), r"ratio=nan.*\(0, 1\]"),
        (dict(ratio=0.5, budget=4), r"ratio=0\.5.*budget=4"),
        (dict(kappa=5), r"kappa=5.*block=8"),  # 2 * 5 - 1 = 9
        (dict(kappa=1, block=1), r"kappa=1.*block=1"),
        (dict(overflow="drop"), r"overflow='drop'.*dense.*truncate"),
        (dict(index="pages"), r"index='pages'.*sketch"),
        (dict(archive_memory="tape"), r"archive_memory='tape'.*device"),
        (dict(recall="pages"), r"recall='pages'.*certified.*none"),
        (dict(bound="loose"), r"bound='loose'.*calibrated.*sound"),
        (dict(implementation="mosaic_cpu"), r"implementation='mosaic_cpu'.*None, 'xla', 'mosaic_tpu', 'mosaic_gpu'"),
        (dict(calibration="never"), r"calibration='never'.*prompt.*decode"),
        (dict(dtype=jnp.float16), r"dtype='float16'.*float32.*bfloat16"),
        (dict(dtype="row"), r"dtype='row'.*float32.*bfloat16"),
        (dict(sketch_dtype=np.int8), r"sketch_dtype='int8'.*float16"),
    ],
    ids=str,
)
def test_a_bad_field_is_named_with_its_value_and_what_would_be_right(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_the_largest_kappa_below_the_limit_is_accepted():
    assert small(kappa=4).lowpass_bins == 4  # 2 * 4 - 1 = 7 < 8


def test_an_implementation_that_cannot_run_is_refused():
    spec = small(implementation="mosaic_tpu")
    with pytest.raises(ValueError, match=r"implementation='mosaic_tpu' cannot run here.*xla"):
        vj.attend(spec, vj.init(spec, 1), jnp.zeros((1, spec.num_heads, spec.row_dim)))


@pytest.mark.parametrize("batch", [0, -1, 1.5])
def test_a_bad_batch_is_named(batch):
    with pytest.raises(ValueError, match=f"batch={batch}"):
        vj.init(SPEC, batch)
    with pytest.raises(ValueError, match=f"batch={batch}"):
        SPEC.nbytes(batch)
