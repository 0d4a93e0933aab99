"""Trains a tiny Kimi Linear to find needles in real prose, and writes it as a checkpoint.

    python -m experiments.train --config=configs/train_tiny.py

The output folder gets trials.jsonl (one row per logged or checked step), loss.png and state/ (orbax); a killed run goes
on from its last saved step and ends with the same weights, because a step's batch is a function of seed and step alone.
After the last step the folder `checkpoint` of the config gets config.json, model.safetensors, the tokenizer,
train_log.jsonl, loss.png, training.json (the exact command and the final check) and README.md.

Recipe and stopping point are judged by one thing: the NLL of the dense model on validation needles, whose prose, names
and seeds are apart from those of the test trials. No selector is ever run here.
"""

import dataclasses
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from flax import nnx

from configs import train_tiny
from experiments.harness import card
from experiments.harness.runner import Run, UserError, launch, make_writable, reading_input
from experiments.text import corpus, needles
from vestige_jax.models import Decoder, ModelConfig, Tokenizer, save

MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
PADDING = 64  # validation sequences are padded to a multiple of this, so that few shapes are compiled
Step = dict[str, jax.Array]


def main(config: ml_collections.ConfigDict, out: Path) -> None:
    trainer = Trainer(config)
    facts = dict(text=trainer.prose.hash, seeds=[config.seed])
    with Run(out, config, key=("step", "kind"), **facts) as run, Saved(out / "state") as saved:
        start = saved.restore(trainer.init())
        for state in trainer.run(start, _Log(run)):
            if state.step % config.save_every == 0 or state.step == trainer.steps:
                saved.save(state)
        rows = list(run.rows)
        final = [row for row in rows if row["kind"].startswith("final")]
        card.plot(rows, out / "loss.png")
        export(trainer, state, Path(config.checkpoint), out, final)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that a step changes."""

    params: Any
    optimizer: Any
    step: int = dataclasses.field(metadata={"static": True}, default=0)


@dataclasses.dataclass(frozen=True)
class Phase:
    """`steps` batches of `batch` sequences of `length` tokens; `main` is the chance of the main template."""

    length: int
    batch: int
    steps: int
    main: float


class Trainer:
    """The model, its data and one compiled update per sequence length."""

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            check_counts(config)
            check_recipe(config)
            self.phases = [read_phase(phase) for phase in config.phases]
            self.steps = sum(phase.steps for phase in self.phases)
            self.tokenizer = Tokenizer.load(config.tokenizer)
            self.prose = needles.Prose(corpus.load(config.text), self.tokenizer)
            self.model_config = model_config(config, self.tokenizer)
            self.optimizer = optimizer(config, self.steps)
            self._try()
        self.graph, _ = nnx.split(nnx.eval_shape(self._model))
        self._update = jax.jit(partial(update, self.graph, self.optimizer), donate_argnums=(0, 1))
        self._nll = jax.jit(partial(answer_nll, self.graph))

    def _model(self) -> Decoder:
        return Decoder(self.model_config, rngs=nnx.Rngs(self.config.seed))

    def _try(self) -> None:
        """Draws one of everything: what does not fit is said now, not in twenty minutes."""
        make_writable(Path(self.config.checkpoint), "--config.checkpoint")
        for step in np.cumsum([0, *(phase.steps for phase in self.phases[:-1])]):
            self.batch(int(step))
        for prefix, count, template in (*self.config.checks, *self.config.final_checks):
            needles.trial(self.prose, 0, prefix=prefix, needles=count, template=template, split="validation")

    def init(self) -> State:
        params = rescale(nnx.state(self._model(), nnx.Param), self.config)
        return State(params, self.optimizer.init(params))

    def model(self, state: State) -> Decoder:
        return nnx.merge(self.graph, state.params)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The batch of a step: the same in every run with this config."""
        phase = phase_at(self.phases, step)
        rng = np.random.default_rng([len(corpus.SPLITS), self.config.seed, step])
        mixture = needles.Mixture(*self.config.needles, main=phase.main, text_weight=self.config.text_weight)
        return mixture.batch(self.prose, rng, phase.batch, phase.length + 1)

    def run(self, state: State, log: "_Log") -> Iterator[State]:
        """The state after each step that is left; checks are logged on the way, and a longer one at the end."""
        config = self.config
        bar = tqdm.tqdm(range(state.step, self.steps), initial=state.step, total=self.steps, smoothing=0.05)
        for step in bar:
            params, moments, seen = self._update(state.params, state.optimizer, *self.batch(step))
            state = State(params, moments, step + 1)
            if state.step % config.log_every == 0 or state.step == self.steps:
                bar.set_postfix(log.train(state.step, phase_at(self.phases, step), seen))
            if state.step % config.check_every == 0 and state.step < self.steps:
                for kind in config.checks:
                    log.check(state.step, "check", self.check(state, *kind, trials=config.check_trials))
            yield state
        for kind in config.final_checks:
            log.check(self.steps, "final", self.check(state, *kind, trials=config.final_trials))
        yield state

    def check(self, state: State, prefix: int, count: int, template: str, *, trials: int) -> dict[str, Any]:
        """NLL in nats of the dense model on validation needles, `count` in each prefix, answers teacher-forced."""
        facts = {"prefix": prefix, "needles": count, "template": template}
        drawn = [needles.trial(self.prose, i, split="validation", **facts) for i in range(trials)]
        nll, exact = np.array([self._trial(state, trial) for trial in drawn]).T
        return {
            **facts,
            "trials": trials,
            "nll_median": float(np.median(nll)),
            "nll_mean": float(np.mean(nll)),
            "nll_max": float(np.max(nll)),
            "below_1_nat": float(np.mean(nll < 1)),
            "exact": float(np.mean(exact)),
        }

    def _trial(self, state: State, trial: needles.Trial) -> tuple[float, bool]:
        ids = np.zeros(math.ceil(len(trial.ids) / PADDING) * PADDING, np.int32)
        ids[: len(trial.ids)] = trial.ids
        nll, exact = self._nll(state.params, ids[None], len(trial.prefix) + len(trial.question))
        return float(nll), bool(exact)


def check_counts(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError that names the count that cannot be meant."""
    least = dict.fromkeys(("warmup", "log_every", "save_every", "check_every", "check_trials", "final_trials"), 1)
    for name, low in {**least, "seed": 0}.items():
        if not is_count(config[name], low):
            raise ValueError(f"{name}={config[name]!r} has to be a whole number of at least {low}")
    if not config.phases:
        raise ValueError("phases=() has to hold at least one (tokens, sequences, steps, share)")


def check_recipe(config: ml_collections.ConfigDict) -> None:
    """Raises ValueError that names the number with which nothing could be learnt."""
    for name in ("rate", "clip", "embedding", "residual"):
        if not 0 < config[name] < math.inf:
            raise ValueError(f"{name}={config[name]} has to be a number above 0")
    if not 0 <= config.b2 < 1:
        raise ValueError(f"b2={config.b2} has to lie in 0..1, 1 itself not")
    if not 0 <= config.decay < math.inf:
        raise ValueError(f"decay={config.decay} has to be a number of at least 0")
    for name in ("final", "text_weight"):
        if not 0 <= config[name] <= 1:
            raise ValueError(f"{name}={config[name]} has to lie in 0..1")
    fewest, most = config.needles if len(config.needles) == 2 else (0, 0)
    if not 1 <= fewest <= most:
        raise ValueError(f"needles={config.needles} has to be two whole numbers, the fewest (at least 1) and the most")


def is_count(value: Any, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def read_phase(phase: Any) -> Phase:
    """(tokens, sequences, steps, share) as a Phase; ValueError for anything else."""
    parts = tuple(phase) if isinstance(phase, list | tuple) else ()
    share = parts[3] if len(parts) == 4 else None
    if not (all(map(is_count, parts[:3])) and isinstance(share, int | float) and 0 <= share <= 1):
        expected = "(tokens, sequences, steps, share): three whole numbers of at least 1 and a share in 0..1"
        raise ValueError(f"phases holds {phase!r}, which has to be {expected}")
    return Phase(*parts)


def model_config(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> ModelConfig:
    """The shapes of the config, the vocabulary of the tokenizer; the branch is rotated if `rope` says so.

    Raises ValueError for an attention that is neither 'mla' nor 'gqa', and for a rotated 'gqa'.
    """
    shapes = attention_shapes(config)
    ids = {f"{name}_token_id": tokenizer.special(f"[{name.upper()}]") for name in ("bos", "eos", "pad")}
    size = tokenizer.encoding.n_vocab
    return ModelConfig.from_json({"vocab_size": size, **ids, **shapes})


def attention_shapes(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The shapes of the config, with those of its attention."""
    shapes = json.loads(config.model.to_json())
    if config.attention == "mla":
        return {"model_type": "kimi_linear", "mla_use_nope": not config.rope, **shapes}
    if config.attention != "gqa":
        raise ValueError(f"attention={config.attention!r} is unknown; choose mla or gqa")
    if config.rope:
        raise ValueError("rope=True with attention=gqa: only the branch of MLA can be rotated")
    shapes = {name: value for name, value in shapes.items() if name not in MLA_SIZES}
    return {"model_type": "kimi_linear_gqa", **shapes, **json.loads(config.gqa.to_json())}


def rescale(params: nnx.State, config: ml_collections.ConfigDict) -> nnx.State:
    """Embeddings of standard deviation `embedding`; what writes into the residual stream scaled by `residual`.

    At the initial scales of a big model (0.02) the output of the first blocks would be many times the embeddings.
    """
    scales = {"embed_tokens": config.embedding / config.model.get("initializer_range", 0.02)}
    scales |= dict.fromkeys(("o_proj", "down_proj"), config.residual)
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, leaf.replace(leaf[...] * scales.get(path[-1], 1.0))) for path, leaf in flat])


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise ValueError(f"step is {step} past the last phase")


def optimizer(config: ml_collections.ConfigDict, steps: int) -> optax.GradientTransformation:
    """AdamW under a clipped gradient; warm-up, then a cosine to `final` of the rate. Matrices decay, vectors do not."""
    if config.warmup >= steps:
        raise ValueError(f"warmup={config.warmup} has to be shorter than the {steps} steps of the phases")
    rate = optax.warmup_cosine_decay_schedule(0.0, config.rate, config.warmup, steps, config.final * config.rate)
    matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(rate, b1=0.9, b2=config.b2, weight_decay=config.decay, mask=matrices),
    )


def update(graph, optimizer: optax.GradientTransformation, params, moments, ids, weights) -> tuple[Any, Any, Step]:
    """One step on ids [B,T+1] with weights [B,T+1] on the loss of predicting each of them (the first is given)."""
    loss = lambda params: weighted_nll(nnx.merge(graph, params)(ids[:, :-1]), ids[:, 1:], weights[:, 1:])  # noqa: E731
    (_, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    changes, moments = optimizer.update(gradient, moments, params)
    return optax.apply_updates(params, changes), moments, {**seen, "gradient": optax.tree.norm(gradient)}


def weighted_nll(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, Step]:
    """Weighted mean of the cross-entropy; its plain means over answer digits (weight 1) and over everything else."""
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    loss, answers = _mean(nll, weights), weights == 1
    return loss, {"loss": loss, "answer": _mean(nll, answers), "text": _mean(nll, ~answers)}


def _mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-9)


def answer_nll(graph, params, ids: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(nats, exact match) of the answer ids[0, start : start + DIGITS]."""
    logits = jax.lax.dynamic_slice_in_dim(nnx.merge(graph, params)(ids)[0], start - 1, needles.DIGITS)
    answer = jax.lax.dynamic_slice_in_dim(ids[0], start, needles.DIGITS)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, answer)
    return jnp.sum(nll), jnp.all(jnp.argmax(logits, -1) == answer)


class Saved:
    """Orbax checkpoints of the training state; the last two are kept."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *error) -> None:
        self._manager.close()

    def save(self, state: State) -> None:
        if state.step not in self._manager.all_steps():
            self._manager.save(state.step, args=ocp.args.StandardSave(_leaves(state)))

    def restore(self, fresh: State) -> State:
        """The last saved state, or `fresh` where none is."""
        step = self._manager.latest_step()
        if step is None:
            return fresh
        leaves = self._manager.restore(step, args=ocp.args.StandardRestore(_leaves(fresh)))
        params, moments = jax.tree.unflatten(
            jax.tree.structure((fresh.params, fresh.optimizer)), [leaves[name] for name in sorted(leaves)]
        )
        return State(params, moments, step)


def _leaves(state: State) -> dict[str, jax.Array]:
    """A flat mapping: what is on the disk does not depend on how flax or optax nest their trees."""
    return {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves((state.params, state.optimizer)))}


class _Log:
    """Rows of the run, with the seconds that training took, earlier starts of this run included."""

    def __init__(self, run: Run):
        self._run = run
        self._before = max((row["seconds"] for row in run.rows), default=0.0)
        self._started = time.monotonic()

    def train(self, step: int, phase: Phase, seen: Step) -> dict[str, str]:
        values = {name: float(value) for name, value in seen.items()}
        check_finite(step, values)
        self._add({"step": step, "kind": "train", "length": phase.length, **values})
        return {name: f"{values[name]:.3f}" for name in ("answer", "text")}

    def check(self, step: int, kind: str, values: dict[str, Any]) -> None:
        self._add({"step": step, "kind": f"{kind}: {card.cell(values)}", **values})
        tqdm.tqdm.write(f"step {step}, {card.cell(values)}: {card.phrase(values)}")

    def _add(self, row: dict[str, Any]) -> None:
        self._run.add({**row, "seconds": round(self._before + time.monotonic() - self._started, 1)})


def check_finite(step: int, values: Mapping[str, float]) -> None:
    """Raises UserError when a step's numbers are no longer finite."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise UserError(f"step {step} gave {', '.join(bad)} that are not finite: lower --config.rate")


def export(trainer: Trainer, state: State, folder: Path, out: Path, final: list[dict[str, Any]]) -> None:
    """Writes the checkpoint folder: what `vestige_jax.models.load` reads, and how it came about."""
    model = trainer.model(state)
    save(folder, model, trainer.tokenizer)
    shutil.copyfile(out / "trials.jsonl", folder / "train_log.jsonl")
    shutil.copyfile(out / "loss.png", folder / "loss.png")
    facts = {
        "command": command(sys.argv),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "steps": state.step,
        "text_hash": trainer.prose.hash,
        "config": json.loads(trainer.config.to_json_best_effort()),
        "validation": final,
        "starts": json.loads((out / "meta.json").read_text())["starts"],
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(card.render(folder.name, facts, trainer.model_config))


def command(argv: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "experiments.train", *argv[1:]])


if __name__ == "__main__":
    launch(main, like=train_tiny)
