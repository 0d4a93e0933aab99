"""KVzip (Kim et al., arXiv 2505.23416): the rows that are needed to say the context again."""

from vestige_jax.baselines.observed import Observed, Selector


def kvzip() -> Selector:
    """The largest softmax weight that any query and head gives a row while the prompt is read again (VestigeKV §5).

    The second reading is `experiments.rereading`'s: parts of 2000 tokens, each behind the same phrase. Adapted: the
    largest over all heads, for one row serves them all; a softmax over everything the query sees, where the original
    normalises over the part being repeated. The original's budget is one over all layers: `kvzip_global`.
    """

    def score(observed: Observed):
        (repeat,) = observed.need("repeat")
        return repeat

    return score
