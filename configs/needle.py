"""The main job: a needle in 4096 tokens of held-out prose, compressed 8, 32 and 128 times, then asked for.

    python -m experiments.needle --config=configs/needle.py

Shows what tier 1 (sigma) keeps that other selectors lose, and what the recall tier brings back at what cost. Protocol:
VestigeKV §6. The index has rank 8 of 32 and a step may fetch 1024 of about 3970 archived rows; a step in which more
fire attends all of them and counts as overflow. Every method holds exactly m + 4 rows a layer, m = 4096 / ratio.

Expected on tiny_nope, on two quiet cores in less than five minutes: dense drops at most 2 of 24 trials; vestige intact
1.00 at 8x and 32x with mean attended below .25 and overflow below .1; h2o, streaming and random at most .1 at 32x;
sigma alone somewhere between.
Published (arXiv 2609.03949, Kimi-Linear-48B-A3B-Base): sigma 1.00 .88 .67; snapkv .33 .04 0; h2o and streaming 0. The
table prints each figure beside our cell: another model and other needles, so compare orders, not digits.

More: --config.methods=norm+recall,snapkv+recall    any selector, with or without the recall tier
      --config.methods=tova,kvzip,kmeans,sigma+quest  all names: vestige_jax/baselines/__init__.py
      --config.fetch=16 --config.overflow=truncate  at most 16 rows a step: enough for a single needle
      --config.text=PATH  --config.seed=1  --config.trials=48  --config.needles=5
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"
    config.allow_rope = False  # True runs a model with a rotated branch, as the control arm
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.trials = 24  # for each prefix and depth
    config.template = "passcode"
    config.needles = 1  # sentences in a prompt, one of them asked for
    config.prefixes = (4096,)  # tokens before the cut, whole blocks
    config.depths = (0.1, 0.8)  # edges: the needle starts at a uniform depth between two neighbours

    config.methods = (
        "vestige",
        "sigma",
        "full_row",
        "norm",
        "random",
        "streaming",
        "h2o",
        "h2o_recent",
        "snapkv",
        "random+recall",
        "stride+recall",
    )
    config.ratios = (8, 32, 128)
    config.block = 4096  # 0: the whole prefix
    config.sinks = 4
    config.rank = 8
    config.fetch = 1024
    config.overflow = "dense"
    config.top_j = config_dict.placeholder(int)
    config.rows_dtype = "float32"  # or bfloat16, as deployed
    config.weights_dtype = "float32"  # bfloat16 for the 48B checkpoint

    config.batch = 8  # trials served together
    config.chunk = 256  # tokens of a prompt per prefill step
    return config
