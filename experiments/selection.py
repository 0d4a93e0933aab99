"""What tier 1 keeps: sigma against every other selector, with recall off (VestigeKV §2, §5, §6).

Needle trials, all measured along one path. Table `methods`: sigma, the whole row, the published baselines, and the
branch at less than its width, on one model. Table `arms`: sigma and its controls on that model and on its twin with a
rotated branch, several training seeds each, beside the leakage floor (nuke: nothing but sinks); and the order of the
selectors on a twin with grouped-query attention. Arms are compared at the longest prefix that every dense model answers
on validation needles (table `reach`). Writes trials.jsonl, summary.csv, claims.csv, meta.json, selection.png and
selection-arms.png.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections

from configs import selection as selection_config
from experiments.harness import twins
from experiments.harness.checkpoints import checkpoint_folder
from experiments.harness.runner import Run, launch, reading_input
from experiments.harness.twins import Twin
from experiments.reports import selection_report
from experiments.reports.selection_report import Reach
from experiments.text import corpus, needles
from experiments.trials import checks, sheets
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from experiments.trials.sheets import Column, Sheet
from vestige_jax import baselines, models
from vestige_jax.spec import CacheSpec

KEY = ("table", "checkpoint", "prefix", "method", "ratio", "trial")
LAYOUT = ("rows_dtype", "sinks", "rank", "fetch", "overflow")
Named = list[tuple[str, int]]
"""Methods and ratios."""
DENSE = ("dense", 1)
MOST_TOKENS = 1 << 24


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.text, seeds=[config.seed]) as run:
        twins.check_weights(run, lab.twins)
        checks.say_missing(lab.twins)
        for prefix in config.prefixes:
            lab.methods(prefix).fill(run, f"methods, {prefix}")
        reach = lab.reach(run)
        for sheet in lab.arms(reach):
            sheet.fill(run, f"arms, {sheet.place['checkpoint']}")
        selection_report.write(run, config, lab.twins, reach)


class Lab:
    """The twins, methods and trials of a config, as sheets to fill. Holds one model at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.text = corpus.load(config.text).hash
            self.twins = checks.family(config)
            self.main = next(twin for twin in self.twins if twin.arm == "nope" and twin.seed == 0)
            self.columns = _columns(config)
            self._prose: dict[bytes, needles.Prose] = {}
            self._cells: tuple[tuple, Cells] | None = None
            for prefix in config.prefixes:  # what cannot be run is said before anything is
                self.methods(prefix)
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = self.main.weights

    def methods(self, prefix: int) -> Sheet:
        """Every method on the main checkpoint."""
        config = self.config
        facts = dict(trials=config.trials, batch=config.batch, block=config.block, allow_rope=config.allow_rope)
        return self._sheet("methods", self.main, prefix, self.columns["methods"], **facts)

    def reach(self, run: Run) -> Reach:
        """How far each twin answers: lengths rise until one is not answered, and no arm goes beyond another."""
        config, reached, limit = self.config, {}, max(self.config.arm_lengths)
        for twin in (twin for twin in self.twins if twin.weights):
            reached[twin.name] = 0
            for length in sorted(length for length in config.arm_lengths if length <= limit):
                facts = dict(trials=config.reach_trials, batch=config.arm_batch, split="validation")
                sheet = self._sheet("reach", twin, length, [DENSE], **facts)
                sheet.fill(run, f"reach, {twin.name}, {length}")
                if not sheets.answers(sheet.rows(run)):
                    break
                reached[twin.name] = length
            if twin.arm != "gqa" and reached[twin.name]:  # gqa is compared by order: it may stay behind
                limit = reached[twin.name]
        return Reach(limit, reached)

    def arms(self, reach: Reach) -> Iterator[Sheet]:
        """The controls on every twin that answers, at the length that they share; the order of all on two of them."""
        for twin in self.twins:
            length = min(reach.limit, reach.reached.get(twin.name, 0))
            ordered = twin.arm == "gqa" or twin == self.main
            columns = dict.fromkeys([*self.columns["arms"], *(self.columns["order"] if ordered else [])])
            if length:
                facts = dict(trials=self.config.trials, batch=self.config.arm_batch)
                yield self._sheet("arms", twin, length, list(columns), **facts)

    def _sheet(
        self,
        table: str,
        twin: Twin,
        prefix: int,
        columns: Named,
        *,
        trials: int,
        batch: int,
        split: str = "test",
        block: int = 0,
        allow_rope: bool = True,
    ) -> Sheet:
        config, branch = self.config, models.ModelConfig.from_json(checkpoint_folder(twin.path)).branch_dim
        columns = [(name, ratio) for name, ratio in columns if _width(name) < branch]  # all of it is sigma itself
        cells = self._load(twin, columns)
        facts = dict(prefix=prefix, seed=config.seed, template=config.template, split=split)
        drawn = [needles.trial(cells.prose, i, **facts) for i in range(trials)]
        batches = sheets.batches(prefix, drawn, batch)
        layout = {name: config[name] for name in LAYOUT} | dict(block=block, allow_rope=allow_rope)

        shared = _spec(cells, batches[0], [cell for cell in columns if not _merges(cell[0])], layout)
        made = [
            Column(
                {"method": name, "ratio": ratio},
                # A merger works for all the room that tier 1 has: it gets what it fills.
                _spec(cells, batches[0], [(name, ratio)], layout) if _merges(name) else shared,
                baselines.method(name),
                ratio,
            )
            for name, ratio in columns
        ]
        place = {"table": table, "checkpoint": twin.name, "prefix": prefix}
        return Sheet(place, cells, batches, made, config.seed, config.dense_below, {"weights": twin.weights})

    def _load(self, twin: Twin, columns: Named) -> Cells:
        """A twin that sees what these methods look at; the text is in tokens once for all of one vocabulary."""
        names = tuple(dict.fromkeys(name for name, _ in columns))
        if self._cells is None or self._cells[0] != (twin, names):
            self._cells = None  # one at a time
            path = checkpoint_folder(twin.path) / "tiktoken.model"
            ranks = path.read_bytes() if path.exists() else b""  # what is missing, the loader says
            loading = {name: self.config[name] for name in ("text", "weights_dtype", "chunk")}
            methods = map(baselines.method, names)
            cells = Cells(twin.path, **loading, methods=methods, prose=self._prose.get(ranks))
            if ranks:
                self._prose[ranks] = cells.prose
            self._cells = (twin, names), cells
        return self._cells[1]


def _spec(cells: Cells, batch: Batch, columns: Named, layout: dict[str, Any]) -> CacheSpec:
    """One spec for these methods and ratios."""
    ratios = [ratio for name, ratio in columns if name != "dense"] or [batch.prefix]
    methods = [baselines.method(name) for name in dict.fromkeys(name for name, _ in columns)]
    return cells.spec(batch, ratios=ratios, methods=methods, **layout)


def _columns(config: ml_collections.ConfigDict) -> dict[str, Named]:
    """(method, ratio) of every cell, dense first. ValueError for an unknown method."""
    widths = [f"sigma_pca{width}" for width in config.widths]
    merges = [name for name in config.methods if _merges(name)]
    methods = [name for name in config.methods if name not in merges]
    grids = [(methods, config.ratios), (widths, config.width_ratios), (merges, config.merge_ratios)]
    return {
        "methods": [DENSE, *(cell for names, ratios in grids for cell in _grid(config, names, ratios))],
        "arms": [DENSE, *_grid(config, config.arm_methods, config.arm_ratios)],
        "order": [DENSE, *_grid(config, config.order_methods, config.arm_ratios)],
    }


def _grid(config: ml_collections.ConfigDict, names: Sequence[str], ratios: Sequence[int]) -> Named:
    """Every name at every ratio, and once more with the recall tier that the config asks for."""
    suffix = {"none": "", "certified": "+recall"}.get(config.recall, f"+{config.recall}")
    again = [name + suffix for name in names if suffix and "+" not in name and not _merges(name)]
    return [(name, ratio) for ratio in ratios for name in [*names, *again] if baselines.method(name)]


def _merges(name: str) -> bool:
    return baselines.method(name).kind == "merge"


def _width(name: str) -> int:
    """Dimensions of the branch that a method looks at; 0 for one that is not about them."""
    width = name.partition("+")[0].removeprefix("sigma_pca")
    return int(width) if width.isdigit() else 0


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    for name in ("trials", "reach_trials", "batch", "arm_batch", "chunk"):
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    for name in ("prefixes", "arm_lengths"):
        if not config[name] or not 1 <= min(config[name]) <= max(config[name]) <= MOST_TOKENS:
            raise ValueError(f"{name}={config[name]} must be numbers of tokens, 1 to {MOST_TOKENS}")
    for name, shortest in (
        ("ratios", "prefixes"),
        ("width_ratios", "prefixes"),
        ("merge_ratios", "prefixes"),
        ("arm_ratios", "arm_lengths"),
    ):
        if not config[name] or not 1 <= min(config[name]) <= max(config[name]) <= min(config[shortest]):
            raise ValueError(
                f"{name}={config[name]} must lie between 1 and the shortest of {shortest}; 32 keeps 1 in 32"
            )
    if not config.methods or not config.arm_methods:
        raise ValueError(f"methods and arm_methods must name at least one; {baselines.known()}")
    rules = ("none", "certified", *(name for name in baselines.RECALLS if name not in ("", "recall")))
    if config.recall not in rules:
        raise ValueError(f"recall={config.recall!r} is unknown; choose from {', '.join(rules)}")
    checks.positive(config, "dense_below")
    lists = ("prefixes", "arm_lengths", "ratios", "width_ratios", "merge_ratios", "arm_ratios", "widths")
    checks.distinct(config, *lists, "methods", "arm_methods", "order_methods")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed} must be at least 0")


if __name__ == "__main__":
    launch(main, like=selection_config)
