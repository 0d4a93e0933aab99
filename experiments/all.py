"""Every table of the paper, one report.

Runs the drivers of the config one after the other, each in a folder of its own under --out, and writes report.md from
what they left there. A driver that is done only reads its rows again; a stopped run goes on where it ended. One that
fails does not stop those behind it: the report says so, and the same command tries it again.
"""

import gc
import importlib
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

import jax
import ml_collections

from configs import all as all_config
from experiments.harness import report
from experiments.harness.runner import UserError, launch, make_writable


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    make_writable(out)
    runs = {name: driver_config(name, config) for name in config.drivers}  # a mistake in the last is said at once
    if config.publish:
        make_writable(pathlib.Path(config.publish).parent, "--config.publish")
    failed = {name: said for name, own in runs.items() if (said := attempt(name, own, out / name))}
    report.write(out, list(runs), out / "report.md", failed)
    if config.publish:
        report.publish(out, list(runs), pathlib.Path(config.publish), failed)
    if failed:
        raise UserError(f"{', '.join(failed)} did not finish, see above; the same command goes on there")


def attempt(name: str, own: ml_collections.ConfigDict, folder: pathlib.Path) -> str:
    """Runs one driver; what went wrong in one line, or nothing."""
    print(f"\n== {name} ==", flush=True)
    start, said = time.monotonic(), ""
    try:
        importlib.import_module(f"experiments.{name}").main(own, folder)
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {said}" if isinstance(error, UserError) else traceback.format_exc(), flush=True)
    gc.collect()
    jax.clear_caches()  # programs take memory maps, of which a process has 65,530: nine drivers could run out of them
    print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return said


def driver_config(name: str, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The driver's own config under the overrides for it. UserError for an unknown driver or field."""
    if name not in all_config.get_config().drivers:
        raise UserError(f"drivers={name!r} is unknown; choose from {', '.join(all_config.get_config().drivers)}")
    own = importlib.import_module(f"configs.{name}").get_config()
    changes = config.overrides.get(name, {})
    unknown = sorted(set(changes) - set(own))
    if unknown:
        raise UserError(f"overrides.{name} has {', '.join(unknown)}, which configs/{name}.py does not know")
    own.update(changes)
    return own


def refuse_overrides(argv: Sequence[str]) -> None:
    """Exits with a sentence on what overrides look like: flags know the fields of the config itself alone."""
    given = [argument for argument in argv[1:] if argument.lstrip("-").startswith("config.overrides")]
    if given:
        sys.exit(
            f"error: {given[0]}: overrides are no flags; write them into a copy of configs/all.py, "
            "like config.overrides.needle = ConfigDict({'trials': 3}), and say --config=COPY"
        )


if __name__ == "__main__":
    refuse_overrides(sys.argv)
    launch(main, like=all_config)
