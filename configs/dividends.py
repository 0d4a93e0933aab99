"""Dividends of an unrotated branch: what other methods' statistics gain from it, each measured on both twins.

    python -m experiments.dividends --config=configs/dividends.py

Of held-out texts, cut at half their length t, per layer; top m of the rows before the cut, m = cut / 32:
  H2O's shelf life      top m by attention summed up to t, overlap with the top m by what arrives in [t, t + horizon)
  SnapKV's vote drift   overlap of votes (32 queries, pooled over 7): of the windows that end at t and at t + horizon
  sink stability        softmax mass on the first 4 rows, by position; the last octave of positions over the first
  Quest's pruned pages  share of 16-row pages whose bound is below the best score of any row, last 32 queries
  projection residual   |delta| over |content score| for queries behind t; rank 8 of 32, fitted to 64 queries before t
  merge class           share of rows in a class of more than one, greedy leaders within 5%
Protocols: VestigeKV §3, §5, §6.

Published: the list, in the paper's appendix (arXiv 2609.03949), but no figure in a form that we have. The rules below
only say in which direction each should go if it is a dividend.
Expected on the tiny twins, on two quiet cores in less than a minute: votes last without rotation (.63 against
.23 of them after 512 tokens), a few rows could be merged (.03 against 0), there is no sink, and Quest prunes nothing
(0 against .05).

On the 48B model (its queries of one text take 2 GiB at 4096 tokens): --config.checkpoint=DIR
--config.weights_dtype=bfloat16 --config.twin= --config.length=4096 --config.horizons=32,128,2048 --config.rank=64
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"
    config.twin = "vestige_jax/checkpoints/tiny_rope"  # the same recipe with a rotated branch; empty: no twin
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.kind = "prose"  # or needle: the end of a needle trial, question and answer included
    config.prompts = 12
    config.length = 1024  # tokens of a text; the cut is in its middle
    config.ratio = 32  # m = cut / ratio
    config.horizons = (32, 128, 512)  # tokens behind the cut
    config.window = 32  # queries of a vote
    config.kernel = 7  # positions that a vote is averaged over
    config.sinks = 4
    config.page = 16
    config.asked = 32  # last queries, for pages
    config.rank = 8
    config.calibration = 64  # queries that the basis is fitted to
    config.tolerance = 0.05  # of a merge class
    config.weights_dtype = "float32"  # bfloat16 for the 48B checkpoint

    # Means over layers; a difference of less than one in a hundred is taken as none. First rows that get less than .05
    # of the attention in the last octave are no sink; a mass that only falls with length keeps .25.
    dividend = "a dividend of NoPE (appendix, no figure)"
    config.claims = ConfigDict(
        {
            "H2O's estimate keeps longer without rotation": dict(
                paper=dividend, quantity="h2o overlap, largest horizon, nope - rope", at_least=0.01
            ),
            "SnapKV's vote drifts less without rotation": dict(
                paper=dividend, quantity="snapkv overlap, largest horizon, nope - rope", at_least=0.01
            ),
            "the first rows are a sink without rotation": dict(
                paper=dividend, quantity="sink mass, last octave, nope", at_least=0.05
            ),
            "sinks are stable without rotation": dict(
                paper=dividend, quantity="sink mass, last over first octave, nope", at_least=0.8
            ),
            "Quest prunes more pages without rotation": dict(
                paper=dividend, quantity="quest pruned, nope - rope", at_least=0.01
            ),
            "a sketch of few columns leaves little of the content scores": dict(
                paper="rank 64 of 512 serves as the index; no figure", quantity="sketch residual, nope", at_most=0.5
            ),
            "rows can be merged only without rotation": dict(
                paper=dividend, quantity="merge class, nope - rope", at_least=0.01
            ),
        }
    )
    return config
