"""One Markdown page from the folders that drivers left: claims and verdicts, tables, figures, commands.

It is made of what lies there and of nothing else: the same rows, versions and commit give the same page.
"""

import ast
import csv
import importlib
import json
import pathlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.harness.rows import atomic
from experiments.harness.runner import ROOT, flat

VERDICTS = ("yes", "no", "can't be told")
INTRODUCTION = """\
Each table is made by the command above it, on tiny models trained in this repository. The published figures come from
other models ({models}): whether ours *agree* was decided by rules that stood in the configs before the runs, on the 95%
interval of our number. "Can't be told" means that the interval spans both verdicts, or that the dense model fails.
Tables are rounded to four digits; {where} have all of them."""
MODELS = "Kimi-Linear-48B-A3B Base and Instruct; DeepSeek-V2-Lite for the rotated arm"
TABLES = ("table.csv", "summary.csv")
"""What a section shows: the first of these that the driver left."""
Link = Callable[[pathlib.Path], str]
Failed = Mapping[str, str]
"""Driver -> why it did not finish."""


def write(out: pathlib.Path, drivers: Sequence[str], path: pathlib.Path, failed: Failed | None = None) -> None:
    """The report on out/DRIVER for each driver; figures are linked from where they are."""
    where = "summary.csv and claims.csv of each folder"
    _write(path, page(out, drivers, lambda figure: figure.relative_to(path.parent).as_posix(), where, failed or {}))


def publish(out: pathlib.Path, drivers: Sequence[str], path: pathlib.Path, failed: Failed | None = None) -> None:
    """The same report at `path`, its figures and summaries copied into a folder of figures/ beside it."""
    folder = path.parent / "figures" / path.stem.lower()
    folder.mkdir(parents=True, exist_ok=True)

    def take(figure: pathlib.Path) -> str:
        name = figure.name if figure.stem.startswith(figure.parent.name) else f"{figure.parent.name}-{figure.name}"
        shutil.copyfile(figure, folder / name)
        return (folder / name).relative_to(path.parent).as_posix()

    where = folder.relative_to(path.parent).as_posix()
    text = page(out, drivers, take, f"{where}/DRIVER.summary.csv and {where}/DRIVER.claims.csv", failed or {})
    for driver in drivers:
        for table in ("summary.csv", "claims.csv"):
            if (out / driver / table).exists():
                shutil.copyfile(out / driver / table, folder / f"{driver}.{table}")
    _write(path, text)


def page(out: pathlib.Path, drivers: Sequence[str], link: Link, where: str, failed: Failed) -> str:
    """The whole page; `link` gives the address of a figure, `where` says which files have all digits."""
    there = [name for name in drivers if (out / name / "meta.json").exists()]
    claims = [{"table": name} | row for name in there for row in _read(out / name / "claims.csv")]
    parts = [
        "# What the paper says, and what came out here",
        INTRODUCTION.format(models=MODELS, where=where),
        _made_by(out, there),
        *(f"**{name} did not finish: {said}**" for name, said in failed.items()),
    ]
    parts += ["## Does it agree?", _count(claims), _claims(claims)]
    for name in there:
        parts += _section(out / name, name, link)
    return "\n\n".join(parts) + "\n"


def _section(folder: pathlib.Path, name: str, link: Link) -> Iterator[str]:
    title = ast.get_docstring(ast.parse((ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8"))) or name
    yield f"## {name}"
    for paragraph in title.split("\n\n"):
        yield " ".join(paragraph.partition("Writes trials.jsonl")[0].split())
    yield f"    python -m experiments.{name} --config=configs/{name}.py{_changes(folder, name)}"
    yield _rows(folder)
    rows = next((rows for rows in (_read(folder / table) for table in TABLES) if rows), [])
    if rows:
        yield markdown(rows, [column for column in rows[0] if any(row[column] for row in rows)])
    if (folder / "notes.txt").exists():
        yield (folder / "notes.txt").read_text(encoding="utf-8").strip()
    for figure in sorted(folder.glob("*.png")):
        yield f"![{figure.stem}]({link(figure)})"


def _rows(folder: pathlib.Path) -> str:
    """What the rows are, and of what: two runs that agree in all of this have the same ones."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    trials = folder / "trials.jsonl"
    count = len(trials.read_text(encoding="utf-8").splitlines()) if trials.exists() else 0
    facts = {"config": meta.get("config_hash"), "text": meta.get("text_hash")}
    facts |= {name: value for name, value in flat(meta["config"]) if name.startswith("weights") and "dtype" not in name}
    return f"{count} rows; " + ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def _changes(folder: pathlib.Path, name: str) -> str:
    """The flags that make the run's config of the driver's own."""
    used = dict(flat(json.loads((folder / "meta.json").read_text(encoding="utf-8"))["config"]))
    own = json.loads(importlib.import_module(f"configs.{name}").get_config().to_json_best_effort())
    return "".join(
        f" --config.{field}={_flag(used[field])}" for field, value in flat(own) if used.get(field, value) != value
    )


def _flag(value) -> str:
    return shlex.quote(",".join(map(str, value)) if isinstance(value, list) else str(value))


def _claims(claims: Sequence[dict]) -> str:
    lines = [
        {
            "table": row["table"],
            "claim": row["claim"],
            "published": row["paper"],
            "rule": row["rule"],
            "ours": _ours(row),
            "agrees with the paper?": f"{row['agrees']}, because {row['because']}" if row["because"] else row["agrees"],
        }
        for row in claims
    ]
    return markdown(lines, list(lines[0])) if lines else "No driver made a claim."


def _ours(row: dict[str, str]) -> str:
    if row["ours"] in ("", "nan"):
        return "-"
    value, low, high = (_short(row[name]) for name in ("ours", "lo", "hi"))
    return f"{value} ({low} to {high}, n = {row['n']})"


def _count(claims: Sequence[dict]) -> str:
    counts = {verdict: sum(row["agrees"] == verdict for row in claims) for verdict in VERDICTS}
    return f"Of {len(claims)} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + "."


def _made_by(out: pathlib.Path, drivers: Sequence[str]) -> str:
    """Commit, versions and device of every start: one line for each that differs, and the drivers it is of."""
    lines: dict[str, dict[str, None]] = {}
    for name in drivers:
        for start in json.loads((out / name / "meta.json").read_text(encoding="utf-8"))["starts"]:
            lines.setdefault(_provenance(start), {})[name] = None
    if len(lines) == 1:
        return f"Made by {next(iter(lines))}."
    return "Made by\n\n" + "\n".join(f"- {line}: {', '.join(names)}" for line, names in lines.items())


def _provenance(start: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    commit = f"commit {start['commit']}" if start["commit"] else "a copy that is no checkout"
    changed = " with uncommitted changes" if start["dirty"] else ""
    return f"{commit}{changed}; {versions}; on {start['device']['count']} {start['device']['kind']}"


def markdown(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *([row.get(column) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value) -> str:
    return "" if value is None else _short(str(value)).replace("|", "\\|").replace("\n", " ")


def _short(text: str) -> str:
    """A number with a fraction to four digits; anything else as it is."""
    try:
        return f"{float(text):.4g}" if "." in text or "e-" in text else text
    except ValueError:
        return text


def _read(path: pathlib.Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _write(path: pathlib.Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
