"""Bad arguments of the passes over rows: one clear error each, that names the argument, before anything is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas.words import to_words
from tests.kernels.cases import normal, same

ROWS = normal(0, 2, 64, 16)
QUERY = normal(1, 2, 3, 16)
LENGTH = np.array([64, 5], np.int32)
ATTEND = dict(query=QUERY, rows=ROWS, length=LENGTH, latent_dim=12, scale=0.3)
LIST = dict(query=QUERY, rows=ROWS, position=np.zeros((2, 4), int), count=np.ones(2, int), latent_dim=12, scale=0.3)
SCAN = dict(
    branch=normal(2, 2, 3, 4), sketch=normal(3, 2, 3, 8), residual=normal(4, 2, 3, 1), threshold=normal(5, 2, 3),
    rows=ROWS, code=normal(6, 2, 64, 8), bound=normal(7, 2, 1, 64), member=np.ones((2, 64), bool), length=LENGTH,
    latent_dim=12,
)  # fmt: skip
MARGINS = kernels_pallas.Margins(normal(8, 2, 200), np.ones((2, 2), np.int32))


def names(cases):
    """One parameter for each, named by its change."""
    return [pytest.param(*case, id=f"{next(iter(case[0]))}-{i}") for i, case in enumerate(cases)]


BAD_QUERIES = names([
    (dict(query=QUERY[0]), r"query has shape \(3, 16\); expected \[B, Q, C\] = \('any', 'any', 'any'\)"),
    (dict(query=QUERY.astype(int)), r"query is int32; expected floats"),
    (dict(query=normal(1, 2, 3, 17)), r"query has C=17 columns; expected at most the W=16 of rows"),
    (dict(query=[[1.0]]), r"query=\[\[1\.0\]\]; expected an array \[B, Q, C\]"),
    (dict(rows=ROWS[:1]), r"rows has shape \(1, 64, 16\); expected \[B, S, W\] = \(2, 'any', 'any'\)"),
    (dict(rows=ROWS.astype(int)), r"rows is int32; expected floats, or words of uint16 or uint32"),
    (dict(rows=ROWS > 0), r"rows is bool; expected floats, or words"),
    (dict(latent_dim=-1), r"latent_dim=-1 must be an integer in 1\.\.16, the columns of query"),
    (dict(latent_dim=0), r"latent_dim=0 must be an integer in 1\.\.16"),
    (dict(latent_dim=17), r"latent_dim=17 must be an integer in 1\.\.16"),
    (dict(query=QUERY[..., :10], latent_dim=12), r"latent_dim=12 must be an integer in 1\.\.10"),
    (dict(latent_dim=12.0), r"latent_dim=12\.0 must be an integer"),
    (dict(latent_dim=True), r"latent_dim=True must be an integer"),
    (dict(scale=float("nan")), r"scale=nan must be a finite number"),
    (dict(scale=-float("inf")), r"scale=-inf must be a finite number"),
    (dict(scale=np.float32("inf")), r"scale=.*inf.* must be a finite number"),
    (dict(scale=None), r"scale=None must be a finite number"),
])  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_QUERIES)
def test_attend_and_attend_list_name_a_bad_query_alike(change, message):
    for function, arguments in (kernels_pallas.attend, ATTEND), (kernels_pallas.attend_list, LIST):
        with pytest.raises(ValueError, match=message):
            function(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    names([
        (dict(length=LENGTH[:1]), r"length has shape \(1,\); expected \[B\] = \(2,\)"),
        (dict(length=np.ones((2, 4), int)), r"length has shape \(2, 4\); expected \[B, Q\] = \(2, 3\)"),
        (dict(length=np.ones((2, 3, 1), int)), r"length has shape \(2, 3, 1\); expected \[B\]"),
        (dict(length=5), r"length=5; expected an array \[B\]"),
        (dict(length=LENGTH.astype(np.float32)), r"length is float32; expected integers"),
    ]),
)  # fmt: skip
def test_attend_names_a_bad_length(change, message):
    with pytest.raises(ValueError, match=message):
        kernels_pallas.attend(**ATTEND | change)


@pytest.mark.parametrize(
    ("change", "message"),
    names([
        (dict(position=np.zeros(4, int)), r"position has shape \(4,\); expected \[B, F\] = \(2, 'any'\)"),
        (dict(position=np.zeros((1, 4), int)), r"position has shape \(1, 4\); expected \[B, F\] = \(2, 'any'\)"),
        (dict(position=np.zeros((2, 4), np.float32)), r"position is float32; expected integers"),
        (dict(count=np.ones(1, int)), r"count has shape \(1,\); expected \[B\] = \(2,\)"),
        (dict(count=np.ones((2, 3), int)), r"count has shape \(2, 3\); expected \[B\] = \(2,\)"),
        (dict(count=np.ones(2, np.float32)), r"count is float32; expected integers"),
    ]),
)  # fmt: skip
def test_attend_list_names_a_bad_list(change, message):
    with pytest.raises(ValueError, match=message):
        kernels_pallas.attend_list(**LIST | change)


@pytest.mark.parametrize(
    ("change", "message"),
    names([
        (dict(branch=SCAN["branch"][:, 0]), r"branch has shape \(2, 4\); expected \[B, H, P\]"),
        (dict(branch=normal(2, 2, 3, 17), latent_dim=None), r"branch has P=17 columns; expected at most the W=16"),
        (dict(sketch=SCAN["sketch"][:, :1]), r"sketch has shape \(2, 1, 8\); expected \[B, H, K\] = \(2, 3, 'any'\)"),
        (dict(residual=SCAN["residual"].astype(int)), r"residual is int32; expected floats"),
        (dict(threshold=np.zeros(2, np.float32)), r"threshold has shape \(2,\); expected \[B, H\] = \(2, 3\)"),
        (dict(threshold=np.zeros((2, 1), np.float32)), r"threshold has shape \(2, 1\); expected \[B, H\] = \(2, 3\)"),
        (dict(rows=ROWS.astype(int)), r"rows is int32; expected floats, or words"),
        (dict(code=SCAN["code"][:, :60]), r"code has shape \(2, 60, 8\); expected \[B, S, N\] = \(2, 64, 'any'\)"),
        (dict(code=SCAN["code"][..., :4]), r"code has shape \(2, 64, 4\) of float32, K=4; expected the K=8 of sketch"),
        (dict(code=np.zeros((2, 64, 8), np.uint8)), r"of uint8, K=16; expected the K=8 of sketch"),
        (dict(code=np.zeros((2, 64, 8), int)), r"code is int.*; expected floats, int8, or uint8 with two numbers"),
        (dict(bound=normal(7, 2, 2, 64)), r"bound has shape \(2, 2, 64\); expected \[B, E, S\] = \(2, 1, 64\)"),
        (dict(bound=normal(7, 2, 64, 1)), r"bound has shape \(2, 64, 1\); expected \[B, E, S\] = \(2, 1, 64\)"),
        (dict(member=np.ones((2, 64), int)), r"member is int64; expected bool"),
        (dict(member=np.ones(64, bool)), r"member has shape \(64,\); expected \[B, S\] = \(2, 64\)"),
        (dict(length=LENGTH.astype(np.float32)), r"length is float32; expected integers"),
        (dict(length=np.ones((2, 3), int)), r"length has shape \(2, 3\); expected \[B\] = \(2,\)"),
        (dict(latent_dim=-4), r"latent_dim=-4 must be an integer in 0\.\.12, where P=4 of W=16 columns can begin"),
        (dict(latent_dim=100), r"latent_dim=100 must be an integer in 0\.\.12"),
        (dict(latent_dim=13), r"latent_dim=13 must be an integer in 0\.\.12"),
    ]),
)  # fmt: skip
def test_scan_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        kernels_pallas.scan(**SCAN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    names([
        (dict(width=-1), r"width=-1 must be an integer >= 0"),
        (dict(width=1.5), r"width=1\.5 must be an integer >= 0"),
        (dict(width=np.zeros(1, int)), r"width=array.* must be an integer >= 0"),
        (dict(margins=tuple(MARGINS)), r"margins is a tuple; expected Margins"),
        (dict(margins=MARGINS._replace(margin=MARGINS.margin[0])), r"margins\.margin has shape \(200,\); .*\[B, S\]"),
        (dict(margins=MARGINS._replace(margin=MARGINS.fired)), r"margins\.margin is int32; expected floats"),
        (dict(margins=MARGINS._replace(fired=MARGINS.fired[:, :1])), r"margins\.fired .*\(2, 1\); .* = \(2, 2\)"),
        (dict(margins=MARGINS._replace(fired=MARGINS.fired * 1.0)), r"margins\.fired is float64; expected integers"),
    ]),
)  # fmt: skip
def test_compact_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        kernels_pallas.compact(**dict(margins=MARGINS, width=4) | change)


def test_what_is_right_at_its_limits_is_accepted():
    """Traced only: the widest latent, a branch at either end of the rows, rows wider than the query, no list at all."""
    trace = lambda function, arguments, **options: jax.eval_shape(lambda: function(**arguments | options))  # noqa: E731
    for latent in (1, 16, np.int64(12)):
        assert trace(kernels_pallas.attend, ATTEND, latent_dim=latent).out.shape == (2, 3, latent)
    for rows in ROWS.astype(jnp.bfloat16), to_words(ROWS), to_words(ROWS, 128):
        trace(kernels_pallas.attend, ATTEND, rows=rows, scale=jnp.float32(0.3))
        trace(kernels_pallas.attend_list, LIST, rows=rows, position=np.zeros((2, 0), int))
    for latent in (0, 12, None):
        trace(kernels_pallas.scan, SCAN, latent_dim=latent)
    nothing = dict(branch=SCAN["branch"][..., :0], sketch=SCAN["sketch"][..., :0], code=SCAN["code"][..., :0])
    for latent in (0, 16, None):
        trace(kernels_pallas.scan, SCAN, latent_dim=latent, **nothing)
    assert trace(kernels_pallas.compact, dict(margins=MARGINS, width=0)).position.shape == (2, 0)


def test_a_bad_argument_is_refused_inside_jit_too():
    with pytest.raises(ValueError, match=r"count has shape \(1,\)"):
        jax.jit(lambda count: kernels_pallas.attend_list(**LIST | dict(count=count)))(np.ones(1, int))


def test_a_query_narrower_than_the_rows_sees_their_first_columns():
    """Rows may be padded behind what they hold, with anything that is finite."""
    narrow = dict(ATTEND, query=QUERY[..., :14])
    cut = kernels_pallas.attend(**dict(narrow, rows=ROWS[..., :14]))
    same(kernels_pallas.attend(**narrow), cut)
