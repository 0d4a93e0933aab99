"""The checkpoints of a comparison between twins: the same recipe, but for one thing, from several training seeds.

nope  `checkpoint`, its branch as projected
rope  `twin`, the branch of q and k rotated
gqa   `gqa`, grouped-query attention without positional encoding in place of MLA

The checkpoint of training seed 3 is the folder whose name ends in _3, beside that of seed 0. One that is not there is
left out, and said to be.
"""

import dataclasses
import pathlib

import ml_collections

from experiments.harness.checkpoints import checkpoint_folder, fingerprint
from experiments.harness.rows import UserError
from experiments.harness.runner import Run

ARMS = {"nope": "", "rope": " --config.rope=True", "gqa": " --config.attention=gqa"}
"""What the recipe is told besides seed and folder."""


@dataclasses.dataclass(frozen=True)
class Twin:
    """One checkpoint; `weights` is its fingerprint, or empty where the folder is missing."""

    arm: str
    path: str
    seed: int
    weights: str

    @property
    def name(self) -> str:
        return pathlib.Path(self.path).name

    @property
    def training(self) -> str:
        """The command that makes a tiny one."""
        folders = f"--config.checkpoint={self.path} --out=results/train_{self.name}"
        start = "python -m experiments.train --config=configs/train_tiny.py"
        return f"{start} --config.seed={self.seed}{ARMS[self.arm]} {folders}"


def family(config: ml_collections.ConfigDict) -> list[Twin]:
    """Every twin that a config names, present or not: rope first, which reaches the least. An empty path is no arm.

    Raises ValueError for a training seed below 0, or for two folders of one name.
    """
    if not config.training_seeds or min(config.training_seeds) < 0:
        raise ValueError(f"training_seeds={config.training_seeds} must be numbers, at least 0")
    places = {"rope": config.twin, "nope": config.checkpoint, "gqa": config.gqa}
    found = []
    for arm, path in places.items():
        for seed in (config.training_seeds if arm != "gqa" else (0,)) if path else ():
            found.append(_twin(arm, path.rstrip("/") if seed == 0 else f"{path.rstrip('/')}_{seed}", seed))
    names = [twin.name for twin in found]
    if len(set(names)) < len(names):
        raise ValueError(f"checkpoint, twin and gqa name {sorted(names)}: rows are told apart by the folder's name")
    return found


def check_weights(run: Run, twins: list[Twin]) -> None:
    """Raises UserError if the run has rows of other weights than a folder holds now."""
    now = {twin.name: twin.weights for twin in twins if twin.weights}
    for row in run.rows:
        if now.get(row["checkpoint"], row["weights"]) != row["weights"]:
            name = row["checkpoint"]
            raise UserError(
                f"{run.folder} has rows of another {name}, which was trained anew since: choose another --out"
            )


def _twin(arm: str, path: str, seed: int) -> Twin:
    folder = checkpoint_folder(path)
    present = (folder / "config.json").exists()
    return Twin(arm, path, seed, fingerprint(folder) if present else "")
