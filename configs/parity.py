"""Does the deployed path give what dense attention gives? Token by token, needle by needle, sample by sample.

    python -m experiments.parity --config=configs/parity.py

text: prefill in chunks, blocks of 256 that close on the way and behind the cut, recall; the median |difference| in NLL
per token against dense, beside the floor: dense again in other chunks, and in float32 in place of bfloat16.
needle: 4096 tokens compressed 8 to 512 times (8 rows and 4 sinks are left), tier 1 alone and with recall.
samples: MAUVE of continuations sampled with fixed keys, against the text's own and against dense samples; dense sampled
once more with other keys is what can be reached. GPT-2, MAUVE's reader, is replaced by the model's own hidden states,
so only differences between our rows mean anything.

Published (Kimi-Linear-48B-A3B, variant not stated): median |difference| .0079, floor .0068; at 512x 6/12 needles by
eviction alone, 12/12 with recall; bits per byte .5881 -> .5885; MAUVE .999 -> .962 on 16 contexts.
Seen on tiny_nope, in six minutes on two cores: floors of .0075 (other chunks) and .0096 (other dtype); the policy an
order above them, .13 to .14 at every ratio, and .02 to .03 bits per byte: a small model spreads its attention on plain
text over many rows, of which none outscores the attended ones, so recall brings back needles but not this. At 512x no
needle by eviction alone, all of them with recall.

On the 48B model (rank 64, fetch 4096, block 4096): --config.checkpoint=DIR --config.other_weights_dtype=bfloat16
--config.block=4096 --config.prefix=10240 --config.tokens=4096 --config.needle_prefix=16384 --config.context=6144
--config.steps=2560 --config.rank=64 --config.fetch=4096 --config.chunk=1024 --config.other_chunk=768
--config.batch=2 --config.needle_batch=2 --config.sample_batch=2 --config.contexts=16 --config.windows=8. Its weights
stay bfloat16, so the floor's other dtype is that of the rows alone.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"
    config.allow_rope = False  # True runs a model with a rotated branch, as the control arm
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.ratios = (8, 32, 128, 512)
    config.deployed = 32  # the ratio that samples are drawn at
    config.block = 256
    config.sinks = 4
    config.rank = 8
    config.fetch = 1024
    config.overflow = "dense"
    config.rows_dtype = "bfloat16"  # as deployed
    config.weights_dtype = "bfloat16"
    config.chunk = 256  # tokens of a prompt per prefill step

    config.windows = 16  # of text
    config.prefix = 1152  # four blocks and a half
    config.tokens = 512  # behind it: two more blocks close
    config.batch = 16
    config.other_chunk = 192  # of the floor
    config.other_rows_dtype = "float32"
    config.other_weights_dtype = "float32"

    config.trials = 12  # needles
    config.needle_prefix = 4096
    config.needle_batch = 6

    config.contexts = 128
    config.context = 448  # tokens: a block and three quarters
    config.steps = 96  # sampled: the second block closes
    config.sample_batch = 64
    config.temperature = 1.0
    config.top_p = config_dict.placeholder(float)
    config.clusters = 12  # of continuations; MAUVE takes a tenth of their number

    # A policy that differs from dense by no more than twice what dense differs from itself passes for dense.
    config.claims = ConfigDict(
        {
            "as close to dense as dense to itself": ConfigDict(
                dict(
                    paper="median |dNLL| .0079, floor .0068: 1.2 times", quantity="policy over floor, 32x", at_most=2.0
                )
            ),
            "bits per byte": ConfigDict(
                dict(paper=".5881 -> .5885", quantity="delta bits per byte, vestige, 32x", at_most=0.002)
            ),
            "recall keeps needles at 512x": ConfigDict(
                dict(paper="12/12", quantity="intact, vestige, 512x", at_least=0.75)
            ),
            "eviction alone loses needles at 512x": ConfigDict(
                dict(paper="6/12", quantity="intact, sigma, 512x", at_most=0.75)
            ),
            "what recall brings back at 512x": ConfigDict(
                dict(paper="6 of 12", quantity="restored by recall, 512x", at_least=0.25)
            ),
            "samples against text": ConfigDict(
                dict(paper="MAUVE .999 -> .962", quantity="MAUVE lost against text", at_most=0.1)
            ),
            "samples against dense samples": ConfigDict(
                dict(paper="MAUVE .999 -> .962", quantity="MAUVE lost against dense", at_most=0.1)
            ),
        }
    )
    return config
