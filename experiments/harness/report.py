"""One Markdown page from the folders that drivers left: claims and verdicts, tables, figures, commands."""

import ast
import csv
import importlib
import json
import pathlib
import shlex
import shutil
from collections.abc import Iterator, Sequence

from experiments.harness.rows import atomic
from experiments.harness.runner import ROOT, flat

VERDICTS = ("yes", "no", "can't be told")
INTRODUCTION = """\
Each table is made by the command above it, on tiny models trained in this repository. The published figures come from
other models ({models}): whether ours *agree* was decided by rules that stood in the configs before the runs, on the 95%
interval of our number. "Can't be told" means that the interval spans both verdicts, or that the dense model fails."""
MODELS = "Kimi-Linear-48B-A3B Base and Instruct; DeepSeek-V2-Lite for the rotated arm"


def write(out: pathlib.Path, drivers: Sequence[str], path: pathlib.Path) -> None:
    """The report on out/DRIVER for each driver; figures are linked from where they are."""
    _write(path, page(out, drivers, lambda figure: figure.relative_to(path.parent).as_posix()))


def publish(out: pathlib.Path, drivers: Sequence[str], path: pathlib.Path) -> None:
    """The same report at `path`, its figures and summaries copied into figures/ beside it."""
    folder = path.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)

    def take(figure: pathlib.Path) -> str:
        name = figure.name if figure.stem.startswith(figure.parent.name) else f"{figure.parent.name}-{figure.name}"
        shutil.copyfile(figure, folder / name)
        return f"figures/{name}"

    text = page(out, drivers, take)
    for driver in drivers:
        for table in ("summary.csv", "claims.csv"):
            if (out / driver / table).exists():
                shutil.copyfile(out / driver / table, folder / f"{driver}.{table}")
    _write(path, text)


def page(out: pathlib.Path, drivers: Sequence[str], link) -> str:
    """The whole page; `link` gives the address of a figure."""
    claims = [{"table": name} | row for name in drivers for row in _read(out / name / "claims.csv")]
    parts = [
        "# What the paper says, and what came out here",
        INTRODUCTION.format(models=MODELS),
        _made_by(out, drivers),
    ]
    parts += ["## Does it agree?", _count(claims), _claims(claims)]
    for name in drivers:
        parts += _section(out / name, name, link)
    return "\n\n".join(parts) + "\n"


def _section(folder: pathlib.Path, name: str, link) -> Iterator[str]:
    title = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8"))) or name
    yield f"## {name}"
    yield " ".join(title.split("\n\n")[0].split())
    yield f"    python -m experiments.{name} --config=configs/{name}.py{_changes(folder, name)}"
    rows = _read(folder / "summary.csv")
    if rows:
        yield markdown(rows, list(rows[0]))
    for figure in sorted(folder.glob("*.png")):
        yield f"![{figure.stem}]({link(figure)})"


def _changes(folder: pathlib.Path, name: str) -> str:
    """The flags that make the run's config of the driver's own."""
    used = dict(flat(json.loads((folder / "meta.json").read_text(encoding="utf-8"))["config"]))
    own = json.loads(importlib.import_module(f"configs.{name}").get_config().to_json_best_effort())
    return "".join(f" --config.{field}={_flag(used[field])}" for field, value in flat(own) if used[field] != value)


def _flag(value) -> str:
    return shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))


def _claims(claims: Sequence[dict]) -> str:
    lines = [
        {
            "table": row["table"],
            "claim": row["claim"],
            "published": row["paper"],
            "rule": row["rule"],
            "ours": f"{row['ours']} ({row['lo']} to {row['hi']}, n = {row['n']})",
            "agrees with the paper?": f"{row['agrees']}, because {row['because']}" if row["because"] else row["agrees"],
        }
        for row in claims
    ]
    return markdown(lines, list(lines[0])) if lines else "No driver made a claim."


def _count(claims: Sequence[dict]) -> str:
    counts = {verdict: sum(row["agrees"] == verdict for row in claims) for verdict in VERDICTS}
    return f"Of {len(claims)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "."


def _made_by(out: pathlib.Path, drivers: Sequence[str]) -> str:
    """Commit, versions and device of every start: one line for each that differs."""
    starts = [start for name in drivers for start in json.loads((out / name / "meta.json").read_text())["starts"]]
    lines = {_provenance(start): None for start in starts}
    return "\n".join(f"- {line}" for line in lines)


def _provenance(start: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    changed = " with uncommitted changes" if start["dirty"] else ""
    return f"commit {start['commit']}{changed}; {versions}; {start['device']['kind']}"


def markdown(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *([row.get(column) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: pathlib.Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
