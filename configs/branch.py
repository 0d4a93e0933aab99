"""Branch anatomy: what the unrotated branch of an MLA row carries, layer by layer.

    python -m experiments.branch --config=configs/branch.py

512 queries of the second half of each held-out text, every head, against all rows that they see: how long branch and
content are (rows of the kv_a projection, and activations), how much of the variance of scores the branch makes, and how
often the best row stays the best when scores are made of the branch alone, or of the content alone. Protocol: VestigeKV
§6. The twin stands beside it because retention does not depend on rotation: it does not tell the two apart.

Published (arXiv 2609.03949, Kimi-Linear-48B-A3B-Base): weight norm ratio of layers 3, 7, 11, 15, 19, 23, 26: 1.188 .908
1.111 1.505 1.945 2.333 3.482; share of score variance .68; top-1 retention by the branch .9869, by the content .0001
(by the branch of a RoPE model: .99 as well).
Expected on the tiny twins, on two quiet cores in less than 90 seconds: the branch makes .6 of the score variance in
both arms, but no part alone is enough: the branch keeps .33 (nope) and .41 (rope) of the best rows, the content .15 and
.06.

On the 48B model: --config.checkpoint=DIR --config.weights_dtype=bfloat16 --config.twin= --config.length=4096
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
    config.length = 1024  # tokens of a text
    config.queries = 512  # asked in its second half
    config.weights_dtype = "float32"  # bfloat16 for the 48B checkpoint

    # Shares are means over layers. "Most" is taken as nine of ten, "nothing" as one of ten.
    config.claims = ConfigDict(
        {
            "the branch alone finds the best row": dict(
                paper="top-1 retention by the branch .9869 (Base)", quantity="top-1 by branch, nope", at_least=0.9
            ),
            "the content alone does not": dict(
                paper="top-1 retention by the content .0001 (Base)", quantity="top-1 by content, nope", at_most=0.1
            ),
            "the branch makes most of the score variance": dict(
                paper="share of score variance .68 (Base)", quantity="score variance by branch, nope", at_least=0.5
            ),
            "rotation takes no retention away": dict(
                paper="top-1 retention by the branch .99 in a RoPE model as well",
                quantity="top-1 by branch, nope - rope",
                at_most=0.1,
            ),
            "branch weights are no shorter than content weights": dict(
                paper="norm ratio .908 to 3.482 by layer (Base)", quantity="weight norm ratio, smallest", at_least=0.9
            ),
            "branch weights grow with depth": dict(
                paper="norm ratio 1.188 in the first layer, 3.482 in the last (Base)",
                quantity="weight norm ratio, last over first",
                at_least=1.0,
            ),
        }
    )
    return config
