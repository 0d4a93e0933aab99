"""The index: how few bytes a row find it again. The paper's sketch against the balanced index (VestigeKV §3, §8).

Every kind, rank, width of code and ratio, on needles, key-value lines, and text behind a prefix of its own kind and of
another; twins with and without a rotated branch, several training seeds. Beside them, on the rows and queries of one
dense pass, what an index has to look at, how many queries it takes, and how it ages. Writes trials.jsonl, summary.csv,
trainings.csv (the two indexes that the claims compare, training by training), ablations.csv, claims.csv, meta.json and
index.png.
"""

import math
import pathlib

import ml_collections

from configs import index as index_config
from experiments.harness import programs, twins
from experiments.harness.checkpoints import checkpoint_folder
from experiments.harness.runner import Run, launch, reading_input
from experiments.harness.twins import Twin
from experiments.reports import index_report
from experiments.text import corpus, needles
from experiments.trials import checks, index_ablations, index_workloads, sheets
from experiments.trials.cells import Cells
from experiments.trials.index_grid import KEY, Grid, kinds, named
from experiments.trials.index_workloads import Workload

LAYOUT = ("rows_dtype", "sinks", "fetch", "overflow", "shrinkage")


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.text.hash, seeds=[config.seed]) as run:
        twins.check_weights(run, lab.twins)
        checks.say_missing(lab.twins)
        for twin in lab.present:
            lab.load(twin)
            for kind in lab.workloads:
                programs.drop_many()
                workload = lab.answered(run, twin, kind)
                if workload:
                    label = f"{twin.name}, {workload.name}"
                    lab.grid(twin, workload, config.trials, "test").fill(run, label)
            lab.ablate(run, twin)
        index_report.write(run, config, lab.twins)


class Lab:
    """The twins, workloads and kinds of index of a config. Holds one model at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.text, self.other = corpus.load(config.text), corpus.load(config.other_text)
            self.twins = checks.family(config)
            self.workloads = index_workloads.candidates(config)
            self.kinds = kinds(config)
            self.present = [twin for twin in self.twins if twin.weights]
            self._texts: dict[bytes, dict[str, needles.Prose]] = {}
            self._check_layouts()
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.other_text_hash = self.other.hash

    def load(self, twin: Twin) -> None:
        """Makes this twin the one that is measured; its texts are in tokens once for all of one vocabulary."""
        config, self.cells = self.config, None
        path = checkpoint_folder(twin.path) / "tiktoken.model"
        ranks = path.read_bytes() if path.exists() else b""  # what is missing, the loader says
        loading = {name: config[name] for name in ("text", "weights_dtype", "chunk")}
        known = self._texts.get(ranks, {})
        self.cells = Cells(twin.path, **loading, prose=known.get("prose"))
        code = known.get("code") or needles.Prose(self.other, self.cells.prose.encoder)
        self.texts = {"prose": self.cells.prose, "code": code}
        if ranks:
            self._texts[ranks] = self.texts

    def answered(self, run: Run, twin: Twin, kind: str) -> Workload | None:
        """The first workload of a kind that dense attention answers, on validation needles; None if it is none."""
        for workload in self.workloads[kind]:
            if workload.text:  # nothing is asked
                return workload
            grid = self.grid(twin, workload, self.config.reach_trials, "validation")
            grid.fill(run, f"reach, {twin.name}, {workload.name}")
            if sheets.answers(grid.rows(run)):
                return workload
        return None

    def grid(self, twin: Twin, workload: Workload, count: int, split: str) -> Grid:
        """Test trials under every index; validation trials densely."""
        config, test = self.config, split == "test"
        batches = index_workloads.batches(workload, self.texts, config, count=count, split=split)
        tokens = config.tokens - 1
        name = workload.name if test else f"reach, {workload.name}, {workload.prefix}"
        return Grid(
            place={"checkpoint": twin.name, "workload": name},
            cells=self.cells,
            batches=batches,
            kinds=self.kinds,
            ratios=config.ratios,
            layout={field: config[field] for field in LAYOUT} | {"allow_rope": twin.arm == "rope"},
            seed=config.seed,
            bound=config.within * tokens if workload.text else 1.0,
            below=math.inf if workload.text else config.dense_below,
            number=config.number_bytes,
            facts={"arm": twin.arm, "weights": twin.weights, "kind": workload.kind, "prefix": workload.prefix},
            dense_only=not test,
        )

    def ablate(self, run: Run, twin: Twin) -> None:
        """What an index has to look at, on the rows and queries of held-out text."""
        facts = {"arm": twin.arm, "weights": twin.weights}
        long = (twin.arm, twin.seed) == ("nope", 0)
        index_ablations.fill(run, self.config, twin.name, facts, self.cells, long=long)

    def _check_layouts(self) -> None:
        """What cannot be run is said before anything is: every workload under every index, on the first twin."""
        twin = self.present[0]
        self.load(twin)
        for workload in (workload for group in self.workloads.values() for workload in group):
            grid = self.grid(twin, workload, 1, "test")
            for kind in self.kinds:
                with checks.naming(self.config, **named(self.config, kind)):
                    grid.spec(grid.batches[0], kind)


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    least = dict(trials=1, reach_trials=1, batch=1, chunk=1, number_bytes=1, seed=0, tokens=2, ablation_texts=1)
    least["old_texts"] = 1
    for name, bound in least.items():
        if config[name] < bound:
            raise ValueError(f"{name}={config[name]} must be at least {bound}")
    checks.positive(config, "dense_below", "within")
    for value in config.shrinkages:
        if not value > 0:
            raise ValueError(f"shrinkages={value} must be above 0")
    for value in config.many:
        if value < 1:
            raise ValueError(f"many={value} must be at least 1, needles")
    checks.distinct(config, "ratios", "workloads")
    shortest = min((config.prefix, *config.pairs))
    if not config.ratios or not 1 <= min(config.ratios) <= max(config.ratios) <= shortest:
        what = f"the shortest of prefix={config.prefix} and pairs={config.pairs}"
        raise ValueError(f"ratios={config.ratios} must lie between 1 and {what}; 32 keeps one row in 32")
    if config.tokens >= config.prefix - index_workloads.ROOM:
        raise ValueError(f"tokens={config.tokens} must be fewer than prefix={config.prefix}, a block, by more than 8")
    for name, values, most in (
        ("fit_queries", (config.fit_queries,), config.prefix),
        ("calibration_queries", config.calibration_queries, config.prefix),
        ("calibration_rows", config.calibration_rows, config.prefix),
        ("ages", config.ages, config.prefix // 8),
    ):
        for value in values:
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
            if value > most:
                raise ValueError(f"{name}={value} must be at most prefix={config.prefix}, for ages an eighth of it")
    for value in config.calibration_rows:
        if config.prefix % value:
            raise ValueError(f"calibration_rows={value} must divide prefix={config.prefix}: rows are evenly spaced")
    for prefix in config.old_prefixes:
        if config.old_fit < 1 or prefix % config.old_fit:
            raise ValueError(f"old_prefixes={prefix} must be a multiple of old_fit={config.old_fit}")
    if not config.workloads:
        raise ValueError(f"workloads={config.workloads} must name one of {', '.join(index_workloads.KINDS)}")


if __name__ == "__main__":
    launch(main, like=index_config)
