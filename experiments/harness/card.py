"""The model card and the loss plot of a trained tiny checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vestige_jax.models import ModelConfig

CARD = """# {name}

A Kimi Linear of {parameters:,} parameters (layers {layers}; {branch}) that finds a needle in a long text: a
line such as "The secret passcode for Tirako is 48213." It exists to run the project's experiments on a CPU in minutes.
It is in the on-disk format of the 48B model: `vestige_jax.models.load(folder)`.

## Validation

The dense model on needles in held-out prose; NLL in nats, summed over the five digits of the answer, teacher-forced.
Prose, names and seeds are apart from those of the training data and from those of the test trials. Recipe and stopping
point were chosen by this number alone, before any selector was run on the model.

| prefix, tokens | needles in it | wording | trials | median NLL | mean | worst | below 1 nat | exact |
|---|---|---|---|---|---|---|---|---|
{table}

## Training

    {command}

{steps:,} steps, {minutes:.0f} minutes on the machine that trained it; `training.json` has the whole config and the
software versions, `train_log.jsonl` the log, `loss.png` the curve. Sequences of {lengths} tokens:
{few} to {many} needles among prose, then a question about each; answer digits have weight 1 in the loss, everything
else {text_weight}.

Text: {source}.
A hash of a document's name puts two thirds into training, the rest is held out.
sha256 of the text: {text_hash}
(it changes a little with the Python version; the committed weights and ranks do not).
Vocabulary: byte pairs trained on the training split, single digits.

## What it cannot do

- It is no language model: its prose is gibberish. It answers this one kind of question.
- It copies five digits that follow a name. `locker` in the table is a wording that it was never trained on; codes of
  another length, names of another build, several facts per name, or reasoning over two needles were not trained either.
- Many needles in one text are harder for it than one.
- It was trained on at most {longest} tokens; validation covers prefixes up to {checked}. Nothing is known beyond.
- Its branch, latents and heads are tiny ({shape}), so compression ratios, fetch rates and recall measured on it say
  little about the figures of a 48B model; they say whether the code does what it should.
- English of the Python documentation only.
"""


def cell(values: Mapping[str, Any]) -> str:
    """Names one kind of check in one phrase."""
    return f"{values['prefix']} tokens, {values['needles']} {values['template']}"


def phrase(values: Mapping[str, Any]) -> str:
    return f"median NLL {values['nll_median']:.4f}, worst {values['nll_max']:.3f}, exact {values['exact']:.2f}"


def render(name: str, facts: Mapping[str, Any], model: ModelConfig) -> str:
    config, validation = facts["config"], facts["validation"]
    lengths = [phase[0] for phase in config["phases"]]
    return CARD.format(
        name=name,
        parameters=facts["parameters"],
        layers=", ".join(_layer(model, i) for i in range(model.num_hidden_layers)),
        branch="the branch rotated by position: the RoPE control arm" if model.rotated else "no positional encoding",
        table="\n".join(map(_line, validation)),
        command=facts["command"],
        steps=facts["steps"],
        minutes=max(row["seconds"] for row in validation) / 60,
        lengths=", then ".join(map(str, lengths)),
        few=config["needles"][0],
        many=config["needles"][1],
        text_weight=config["text_weight"],
        source=config["text"] or "`pydoc_data.topics` and the docstrings of the standard library",
        text_hash=facts["text_hash"],
        longest=max(lengths),
        checked=max(row["prefix"] for row in validation),
        shape=f"{model.branch_dim}, {model.latent_dim} and {model.num_attention_heads}",
    )


def _layer(model: ModelConfig, layer: int) -> str:
    full = "GQA" if model.grouped else "MLA"
    return full if layer in model.full_attn_layers else "KDA"


def _line(row: Mapping[str, Any]) -> str:
    cells = [f"{row['nll_median']:.4f}", f"{row['nll_mean']:.4f}", f"{row['nll_max']:.4f}"]
    facts = [str(row[name]) for name in ("prefix", "needles", "template", "trials")]
    return "| " + " | ".join([*facts, *cells, *_shares(row)]) + " |"


def _shares(row: Mapping[str, Any]) -> list[str]:
    return [f"{row[name]:.2f}" for name in ("below_1_nat", "exact")]


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training loss on answers and text, and the validation NLL at each prefix, against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("answer", "text"):
        _curve(left, name, [(row["step"], row[name]) for row in rows if row["kind"] == "train"])
    checks = [row for row in rows if "prefix" in row]
    for label in dict.fromkeys(map(cell, checks)):
        points = [(row["step"], max(row["nll_median"], 1e-6)) for row in checks if cell(row) == label]
        _curve(right, label, points, marker="o")
    left.set(xlabel="step", ylabel="nats per token", title="training", ylim=(0, None))
    right.set(xlabel="step", ylabel="median NLL of the answer, nats", title="validation needles", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


def _curve(axes, label: str, points: Sequence[tuple[int, float]], **style) -> None:
    if points:
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
