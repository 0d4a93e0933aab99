"""What every driver stands on: its command line, its output folder, and rows that let a killed run go on.

A driver reads top to bottom::

    def main(config, out):
        with Run(out, config, key=("method", "ratio", "trial"), text=corpus.text_hash) as run:
            cells = itertools.product(config.methods, config.ratios, range(config.trials))
            for method, ratio, trial in run.todo(cells):
                run.add({"method": method, "ratio": ratio, "trial": trial, "nll": ...})
            summary = summarise(run.rows)
            run.write_csv("summary.csv", summary, COLUMNS)
            print(tables.render(summary, COLUMNS))

    if __name__ == "__main__":
        launch(main)
"""

import contextlib
import csv
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import tqdm
from absl import flags
from ml_collections import config_flags

import vestige_jax
from experiments.harness.rows import Rows, UserError, atomic, write_json

ROOT = pathlib.Path(__file__).resolve().parents[2]
USAGE = """
  --config=FILE        the run, a file of configs/
  --config.NAME=VALUE  another value for one of its fields; commas separate the items of a list,
                       given twice they add up
  --out=DIR            output folder (default: results/<name of the config file>); a stopped run goes on there
"""


Main = Callable[[ml_collections.ConfigDict, pathlib.Path], None]


def launch(main: Main, argv: Sequence[str] | None = None, *, like: types.ModuleType | None = None) -> None:
    """Run ``main(config, out)`` from the command line. A user's mistake ends in one sentence, not in a traceback.

    `like`: the driver's own config; one that lacks some of its fields is another driver's, and is refused.
    """
    argv = sys.argv if argv is None else argv
    if {"-h", "--help"} & set(argv[1:]):
        print((sys.modules[main.__module__].__doc__ or "").strip() + "\n" + USAGE)
        return
    try:
        config, out = parse(argv)
        _check_fields(config, like)
        _check_out(out)
        main(config, out)
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on where this run ended")


@contextlib.contextmanager
def reading_input() -> Iterator[None]:
    """Inside, a ValueError or a file that cannot be read is the user's mistake: methods, checkpoints, texts."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def parse(argv: Sequence[str]) -> tuple[ml_collections.ConfigDict, pathlib.Path]:
    """The config, its overrides applied, and the output folder. Raises UserError on anything it does not know."""
    config, out, rest, file = _flags(argv)
    if config is None:
        raise UserError("say which run: --config=configs/NAME.py")
    if rest:
        raise UserError(f"only flags are understood, got {' '.join(rest)}")
    _split_commas(config, _flags([argv[0], f"--config={file}"])[0])
    return config, pathlib.Path(out or pathlib.Path("results") / pathlib.Path(file).stem)


def _check_out(out: pathlib.Path) -> None:
    """What can be told of the output folder before it is made."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(
            f"--out={out} must be a folder, and {there} is {'closed to writing' if there.is_dir() else 'none'}"
        )


def _check_fields(config: ml_collections.ConfigDict, like: types.ModuleType | None) -> None:
    missing = sorted(set(like.get_config()) - set(config)) if like else []
    if missing:
        own = like.__name__.replace(".", "/") + ".py"
        raise UserError(f"--config is no config of this driver, it lacks {', '.join(missing)}: start from {own}")


def _flags(argv: Sequence[str]) -> tuple[ml_collections.ConfigDict | None, str | None, list[str], str | None]:
    """The config, --out, what is no flag, and the config file."""
    given = next((argument.removeprefix("--config=") for argument in argv if argument.startswith("--config=")), None)
    if given and not pathlib.Path(given.split(":")[0]).is_file():  # what follows a colon is the file's own business
        raise UserError(f"--config={given} must be a config file, like configs/needle.py, and there is none")
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=list(argv))
    flags.DEFINE_string("out", None, "output folder", flag_values=values)
    try:
        rest = values(list(argv))[1:]
        if values.config is None:
            return None, values.out, rest, None
        values.config.to_dict()  # a file that could not be loaded says so when it is first looked at
        return values.config, values.out, rest, values["config"].config_filename
    except AttributeError as error:  # how ml_collections reports a field that the config does not have
        raise UserError(f"the config has no such field: {_one_line(error)}") from None
    except SyntaxError:
        raise UserError("--config must be a Python file of configs/, like configs/needle.py") from None
    except (flags.Error, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(_one_line(error)) from None


class Run:
    """One run of a driver: ``meta.json`` says what it is, ``trials.jsonl`` holds its rows.

    Args:
      out: output folder; made if it is missing.
      config: all that decides the rows.
      key: the fields that name a row.
      text: hash of the text that the rows are made from.
      seeds: seeds that are not in the config.

    Raises UserError, before anything is compiled, if the folder cannot be written or belongs to another config.
    """

    def __init__(self, out, config: ml_collections.ConfigDict, *, key: Sequence[str], text: str = "", seeds=()):
        self.folder, self.config = pathlib.Path(out), config
        make_writable(self.folder)
        self._open(identity(config, text, seeds))
        self.rows = Rows(self.folder / "trials.jsonl", key)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.rows.close()

    def done(self, *key) -> bool:
        """Whether this row is known, from this run or from the one that it goes on with."""
        return self.rows.done(*key)

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one row; it is on the disk when this returns. One that is known already stays as it is.

        The first of a start also says where and with what it was made.
        """
        if self.rows.holds(row):
            return
        if self._start:
            write_json(self.path("meta.json"), self._start)
            self._start = None
        self.rows.add(row)

    def todo(self, keys: Iterable[tuple], label: str = "") -> Iterator[tuple]:
        """The keys whose row is missing when their turn comes, behind a progress bar that counts them all.

        What is measured for one key may give the rows of others, as a batch gives those of all its trials.
        """
        keys = list(keys)
        missing = [key for key in keys if not self.done(*key)]
        with tqdm.tqdm(total=len(keys), initial=len(keys) - len(missing), desc=label, smoothing=0) as bar:
            for key in missing:
                if not self.done(*key):
                    yield key
                bar.update()

    def path(self, name: str) -> pathlib.Path:
        """The path of a file in the output folder."""
        return self.folder / name

    def write_csv(self, name: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Write these columns of ``rows``, atomically; floats with six digits, None as an empty field."""
        with atomic(self.path(name)) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            for row in rows:
                writer.writerow([f"{row[c]:.6g}" if isinstance(row[c], float) else row[c] for c in columns])

    def explain(self, text: str) -> None:
        """How to read the table: printed under it, and kept in notes.txt for the report."""
        print(f"\n{text}\n")
        with atomic(self.path("notes.txt")) as temporary:
            temporary.write_text(text.strip() + "\n", encoding="utf-8")

    def _open(self, facts: dict[str, Any]) -> None:
        path, rows = self.path("meta.json"), self.path("trials.jsonl")
        known = rows.exists() and rows.stat().st_size > 0  # a start that made nothing claims nothing
        if known and not path.exists():
            raise UserError(f"{self.folder} holds trials.jsonl but no meta.json to say of what: choose another --out")
        meta = _read_meta(path) if known else {**facts, "starts": []}
        changes = differences(meta, facts)
        if changes:
            raise UserError(f"{self.folder} was made by another run ({'; '.join(changes)}): choose another --out")
        write_json(path, meta)
        self._start = {**meta, "starts": [*meta["starts"], provenance()]}


def _read_meta(path: pathlib.Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        return {name: meta[name] for name in ("config", "config_hash", "text_hash", "seeds", "starts")}
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error!r}): mend it, or choose another --out") from None


def identity(config: ml_collections.ConfigDict, text: str, seeds: Sequence[int]) -> dict[str, Any]:
    """What two runs must share for their rows to be one result."""
    plain = json.loads(config.to_json_best_effort())
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    return {"config": plain, "config_hash": digest, "text_hash": text, "seeds": list(seeds)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One phrase, ``field: old, now new``, for each fact in which two identities differ."""
    facts = ("config", "text_hash", "seeds")
    before, now = (dict(flat({fact: side[fact] for fact in facts})) for side in (old, new))
    names = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    return [f"{name}: {before.get(name, 'absent')}, now {now.get(name, 'absent')}" for name in names]


def provenance() -> dict[str, Any]:
    """Where and with what the rows of one start are made."""
    packages = ("jax", "jaxlib", "flax", "numpy")
    versions = {"python": sys.version.split()[0], "vestige_jax": vestige_jax.__version__}
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions | {name: importlib.metadata.version(name) for name in packages},
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    """Git's answer about the checkout that this code runs from; None outside one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def make_writable(folder: pathlib.Path, option: str = "--out") -> None:
    """Make the folder. UserError that names the option where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write in the folder {folder} ({error.strerror}): choose another {option}") from None


def _split_commas(config: ml_collections.ConfigDict, default: ml_collections.ConfigDict, path: str = "config") -> None:
    """Lists: 'a,b' arrives as the one string in a tuple and becomes two; numbers must have stayed numbers."""
    for name, value in config.items():
        here = f"{path}.{name}"
        if isinstance(value, ml_collections.ConfigDict):
            _split_commas(value, default[name], here)
        elif isinstance(value, tuple):
            if all(isinstance(item, str) for item in value):
                value = tuple(part.strip() for item in value for part in item.split(",") if part.strip())
            kinds = tuple({type(item) for item in default[name]})
            kinds += (int,) * (float in kinds)
            if default[name] and not all(isinstance(item, kinds) for item in value):
                raise UserError(f"--{here} must be a list like {','.join(map(str, default[name]))}, got {value}")
            config[name] = value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace("\\n", "; ").replace("\n", "; ").replace("\\", "").replace("'", "").split())


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as pairs of a dotted name and a value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value
