"""The main job with a sentence and a question that no model of ours was trained on.

    python -m experiments.needle --config=configs/needle_unseen.py

"The shelf of KEY has the label CODE." Shows whether the cells of configs/needle.py hang on the trained wordings. The
wording was picked on validation needles, where the dense model answers all of 24. Expected: no trial dropped,
and the order of methods of the main job; sigma .79 at 128x.
--config.template=locker and =badge are unseen wordings too hard for tiny_nope: with the first, dense fails on 11 of 24
validation needles, so that every cell is marked unusable. Nothing was published for any of them.
"""

from ml_collections import ConfigDict

from configs import needle


def get_config() -> ConfigDict:
    config = needle.get_config()
    config.template = "shelf"
    return config
