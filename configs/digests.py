"""Page digests: do ArkVale's and Quest's pages find the row that a query scores highest, with and without rotation?

    python -m experiments.digests --config=configs/digests.py

The 64 last queries of each text are asked about the prefix before them; pages (ArkVale 32 rows, Quest 16) are ranked by
their digest, head by head; recall@8 is how often the first eight hold the best row. Protocol: VestigeKV §6. Ranking
blindly finds .25 (ArkVale) or .125 (Quest) of 1024 tokens. The rotated twin was trained on 1152 tokens and is not asked
beyond `reach`; both arms are compared, and every claim is judged, at the longest prefix that all arms have.

Published (arXiv 2609.03949, models not stated), worst layer: mean radius NoPE .672, RoPE .024; max radius NoPE at least
.97, RoPE .014; at the median layer NoPE gains .055 only.
The rules below were written before any run on the twins, but for the one that says otherwise. Expected there, on two
quiet cores in less than two minutes: disagreement. At 1024 tokens the worst layer finds .3 to .5 in both arms, the mean
radius no less than the sound one, and the rotated twin finds most in its median layer.

On the 48B model: --config.checkpoint=DIR --config.weights_dtype=bfloat16 --config.twin= --config.prefixes=4096
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"
    config.twin = "vestige_jax/checkpoints/tiny_rope"  # the same recipe with a rotated branch; empty: no twin
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.texts = ("prose", "needle")  # held-out prose, and needle trials with question and answer
    config.trials = 8  # of each kind
    config.prefixes = (1024, 4096)  # rows in pages
    config.reach = 1024  # longest prefix that the twin is asked about
    config.queries = 64  # the last positions, behind the prefix
    config.digests = ("arkvale", "arkvale_mean", "arkvale_cuboid", "arkvale_cuboid_mean", "quest")
    config.top = 8  # pages
    config.weights_dtype = "float32"  # bfloat16 for the 48B checkpoint

    # "Radius" is read as that of ArkVale's sphere. Chance is .25 for eight pages of 1024 tokens.
    config.claims = ConfigDict(
        {
            "a sound radius finds the page without rotation, in every layer": dict(
                paper="recall@8, worst layer, max radius, NoPE: at least .97",
                quantity="worst layer, arkvale, nope",
                at_least=0.9,
            ),
            "a mean radius does not, in some layer": dict(
                paper="mean radius, NoPE: .672", quantity="worst layer, arkvale_mean, nope", at_most=0.9
            ),
            "a sound radius finds more than a mean one without rotation": dict(
                paper=">= .97 against .672",
                quantity="worst layer, arkvale, max over mean, nope",
                at_least=0.05,
            ),
            "with rotation some layer is lost to a sound radius": dict(
                paper="max radius, RoPE: .014", quantity="worst layer, arkvale, rope", at_most=0.3
            ),
            "with rotation some layer is lost to a mean radius": dict(
                paper="mean radius, RoPE: .024", quantity="worst layer, arkvale_mean, rope", at_most=0.3
            ),
            "the median layer is no worse without rotation": dict(
                paper="median gain +.055", quantity="median gain, arkvale", at_least=0.0
            ),
            # Restated after the first runs: of a gain that is negative, "at most .2" says nothing.
            "the median layer changes little with rotation": dict(
                paper="median gain +.055 only", quantity="median change, arkvale", at_most=0.2
            ),
        }
    )
    return config
