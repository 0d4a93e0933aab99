"""How long a decode step takes with the policy and without, on the device at hand.

    python -m experiments.bench --config=configs/bench.py

One MLA layer of Kimi Linear's sizes (latent 512, branch 64, 32 heads). Dense and policy steps take turns in one process
after a warm-up; times are medians with quartiles. Rows and queries are synthetic, and z is set so that `fired` of the
archive fires, the share that the byte account of VestigeKV §3 assumes; how many did is in every row. Then each stage
alone, what closing a block costs, what appending adds to prefill, and a whole model per token.

Dense is the fastest of what the cache serves on overflow and of a chunked attention over the plain rows, in their own
precision and upcast to float32, in short and in long chunks. An attention of two einsums stands beside it: dense must
not be slower than 1.2 times that, or the ratio is with a straw man. On a CPU attention is bound by arithmetic: read the
operations per second there, and the compile report for bytes.

Beside the paper's index (a sketch of `rank` numbers of 16 bits, and the branch) stand balanced ones of 8 and 4 bits and
of as many dimensions in all (VestigeKV §8), fitted to the same queries and rows. As many rows fire under each, although
a balanced index needs fewer: what differs is the scan.

`lengths` are closed rows; the tail holds `tail` more, half a block, its mean while decoding. Empty lists choose by
device: 4k to 128k and batch 1, 4 on a CPU, 8k to 512k and batch 1, 4, 16 on a GPU or TPU. What would not fit in
`memory` of the device is left out, and said.

Wanted at 32k on a CPU, at 128k elsewhere: 3 times ahead. Expected on two cores of an AVX-512 server, in ten minutes:
3.2 in float32 and 3.3 in bfloat16, against dense that takes less than half the time of two einsums.
Published (whole server, two GPUs, not the same thing): crossover at about 28k tokens; 4.8 / 4.2 ms a token at 128k.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.latent_dim = 512
    config.branch_dim = 64
    config.heads = 32
    config.rank = 64
    config.balanced_rank = 0  # of the balanced indexes that are timed beside the paper's; 0: rank + branch_dim
    config.balanced_bits = (8, 4)
    config.fetch = 4096
    config.block = 4096
    config.implementation = ""  # xla, mosaic_tpu or mosaic_gpu; empty: the best for the device

    config.dtypes = ("float32", "bfloat16")
    config.lengths = ()
    config.batches = ()
    config.stage_batches = (1,)  # at which stages, blocks, prefill and other indexes are timed too
    config.tail = 2048
    config.fired = 0.005
    config.memory = 0.5  # share of the device's memory that a cache and its plain copy may take

    config.rounds = 25
    config.seconds = 6.0  # a group of programs stops taking turns after that, with 3 rounds at the least
    config.inner = 0  # steps in one compiled loop; 0: 1 on a CPU, 32 on a GPU or TPU

    config.copy_mebibytes = 256  # of the array whose copy measures the bandwidth
    config.matmul_side = 2048  # of the matrices whose product measures the arithmetic

    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"  # empty: no whole model
    config.model_lengths = (4096, 16384)

    config.minutes = 0.0  # no new group of programs is begun after that; the same command goes on. 0: no limit
    config.publish = ""  # folder for copies of summary, programs and figure, named after the device

    # The claim of this implementation, not of the paper. 95% intervals of the median.
    config.ahead = 3.0  # dense / policy, at least
    config.ahead_at = 0  # rows; 0: 32768 on a CPU, 131072 on a GPU or TPU
    config.straw = 1.2  # dense / einsum, at most
    config.balanced_8 = 1.0  # step with a balanced index of 8 bits / with the paper's, at most
    return config
