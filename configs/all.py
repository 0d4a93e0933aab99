"""Every table of the paper on the tiny twins: each driver in turn, one report.

    python -m experiments.all --config=configs/all.py

Writes results/all/report.md: what the paper claims, the rule that was written down for it, our number, and whether it
agrees; then each driver's table and figure, and the command that makes them alone. It goes on where it was stopped.
A driver that fails does not stop the others: the report says so, and the same command tries it again.
--config.publish=experiments/REPORT.md also writes it there, with its figures and summaries in figures/report/.

17 minutes on two quiet cores: recall and selection 5 each, parity 3, all others together 4.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.drivers = (
        "needle",
        "branch",
        "digests",
        "geometry",
        "dividends",
        "selection",
        "recall",
        "lm_cost",
        "parity",
    )
    config.overrides = ConfigDict()  # of a driver's config: config.overrides.needle = ConfigDict(dict(trials=12))
    config.publish = config_dict.placeholder(str)  # a second copy of the report, for the repository
    return config
