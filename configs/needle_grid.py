"""Where in the prompt, and how long a prompt: depth in tenths by prefix, at 32x.

    python -m experiments.needle --config=configs/needle_grid.py

Writes grid.csv and one heat map for each method. Four trials a cell: a map to look at, not a measurement (Wilson 95%
of 4 out of 4 is 0.51-1.00). The block is the whole prefix, so that no tail serves the needle.
Seen on tiny_nope, in two minutes: vestige 1.00 all over; sigma with gaps in the middle at 1024, where it keeps 32 rows,
and one or two elsewhere; streaming nowhere but at the very end.
Published: no grid; sigma .88 at prefix 4096 and .92 at 16384 (Kimi-Linear-48B).
"""

from ml_collections import ConfigDict

from configs import needle


def get_config() -> ConfigDict:
    config = needle.get_config()
    config.prefixes = (1024, 2048, 4096)
    config.depths = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    config.trials = 4
    config.block = 0
    config.methods = ("vestige", "sigma", "streaming")
    config.ratios = (32,)
    return config
