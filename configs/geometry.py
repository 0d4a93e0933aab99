"""Geometry of rows: what rotation does to the rows that win, to their order, and to rows that could be merged.

    python -m experiments.geometry --config=configs/geometry.py

Winner union: rows of the prefix that are some head's best (or among its best k) in 32 consecutive steps, as a share of
the prefix; with the rows and queries of the nope model as they are, and with their branch rotated (turned): one model,
as published; and in the rotated twin. Rank stationarity: a query is fixed before rotation and asked at t and at t +
shift; overlap of the top m of the prefix, m = prefix / 32. Without rotation it is 1 by construction. Distinct rows:
greedy leaders, ||a - b|| <= tolerance ||a||; what could be merged. Protocols: VestigeKV §1, §6.

Published (arXiv 2609.03949, models not stated): top-1 union .0003-.0019 of the prefix, rotated .0028-.0062, inflation
3.2-8.5; inflation of the top-64 union 1.1-2.1. One row of our prefix is .001 of it, and 16 stand for 64. ("Extreme
points", NoPE 2.3-6.7%, RoPE 10.2-46.8% of tokens, compared two models and were retired by their authors.)
Expected on the tiny twins, on two quiet cores in less than two minutes: rotation spreads the winners 1.3 times (top-1)
and 1.1 times (top-16), and of the best 32 rows .16 (turned) and .22 (rope) are the same 1024 tokens later.

On the 48B model: --config.checkpoint=DIR --config.weights_dtype=bfloat16 --config.twin= --config.prefix=4096
--config.tops=1,64
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"
    config.twin = "vestige_jax/checkpoints/tiny_rope"  # the same recipe with a rotated branch; empty: no twin
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.kind = "prose"  # or needle: the steps are then the end of a needle trial, question and answer
    config.prompts = 12
    config.prefix = 1024  # rows
    config.steps = 32  # queries behind the prefix
    config.tops = (1, 16)  # k of a union
    config.ratio = 32  # m = prefix / ratio
    config.shifts = (16, 128, 1024)  # tokens from t
    config.tolerances = (0.0, 0.01, 0.02, 0.05, 0.1)
    config.weights_dtype = "float32"  # bfloat16 for the 48B checkpoint

    # Means over layers. Inflation: the union of the turned rows over that of the same rows as they are. In a short
    # prefix one row weighs more than in those that were published: a union of .02 is 20 rows of 1024.
    config.claims = ConfigDict(
        {
            "few rows win without rotation": dict(
                paper="top-1 union .0003-.0019 of the prefix", quantity="union, smallest top, nope", at_most=0.02
            ),
            "rotating the same rows spreads the winners": dict(
                paper="top-1 union inflated 3.2-8.5 times", quantity="inflation, smallest top", at_least=2.0
            ),
            "rotation spreads the top-k as well": dict(
                paper="top-64 union inflated 1.1-2.1 times", quantity="inflation, largest top", at_least=1.05
            ),
            "but not as much": dict(
                paper="3.2-8.5 against 1.1-2.1",
                quantity="inflation, smallest over largest top",
                at_least=1.2,
            ),
            "without rotation the order of rows is stationary": dict(
                paper="C1: by construction", quantity="overlap, largest shift, nope", at_least=1.0
            ),
            "rotating the same rows makes it depend on when": dict(
                paper="C1 fails under RoPE; no figure", quantity="overlap, largest shift, turned", at_most=0.9
            ),
            "so does training with rotation": dict(
                paper="C1 fails under RoPE; no figure", quantity="overlap, largest shift, rope", at_most=0.9
            ),
            "rows are too distinct to be merged": dict(
                paper="merging 2x and 4x leaves .79 and .33 of needles (Instruct)",
                quantity="distinct, largest tolerance, nope",
                at_least=0.5,
            ),
        }
    )
    return config
