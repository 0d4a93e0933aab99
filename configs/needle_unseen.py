"""The main job with a sentence and a question that no model of ours was trained on.

    python -m experiments.needle --config=configs/needle_unseen.py

"Please write down that KEY wears badge CODE." ... "Answer: KEY wears badge ". Shows whether the cells of
configs/needle.py hang on the trained wording. Expected: dense drops more trials than there; a cell with more than 2 of
24 dropped is marked unusable and says nothing about its method. Nothing was published for it.
"""

from ml_collections import ConfigDict

from configs import needle


def get_config() -> ConfigDict:
    config = needle.get_config()
    config.template = "badge"
    return config
