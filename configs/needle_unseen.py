"""The main job with a sentence and a question that no model of ours was trained on.

    python -m experiments.needle --config=configs/needle_unseen.py

"The locker of KEY opens with CODE." Shows whether the cells of configs/needle.py hang on the trained wordings. The
wording was picked by the dense model on validation needles. Expected: the same order of methods, a few trials dropped.
--config.template=badge is another unseen wording, too hard for tiny_nope: dense drops 12 of 24 trials, so every cell is
marked unusable. Nothing was published for either.
"""

from ml_collections import ConfigDict

from configs import needle


def get_config() -> ConfigDict:
    config = needle.get_config()
    config.template = "locker"
    return config
