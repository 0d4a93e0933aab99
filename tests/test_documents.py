"""What the documents say has to be so: the README's code runs, its commands and links lead somewhere."""

import re

import numpy as np
import pytest

import vestige_jax as vj

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.fixture(scope="module")
def documents(repository) -> dict[str, str]:
    return {name: (repository / name).read_text(encoding="utf-8") for name in DOCUMENTS}


@pytest.fixture(scope="module")
def example(documents) -> dict:
    """The names that the README's example leaves behind."""
    [code] = re.findall(r"```python\n(.*?)```", documents["README.md"], flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 20
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_example_attends_what_it_says(example):
    assert example["out"].shape == (2, 4, 32)
    assert np.isfinite(example["out"]).all()
    np.testing.assert_array_equal(vj.length(example["cache"]), [2008, 1508])
    # Tier 1 of the closed blocks, three and two of 512 rows, and the sinks.
    np.testing.assert_array_equal(example["stats"].kept, [3 * 16 + 4, 2 * 16 + 4])


def test_the_example_calibrates_from_queries_that_were_asked(example):
    assert (np.asarray(example["lengths"])[:, None] - 64 + np.arange(64)).min() >= 0
    assert np.isfinite(example["cache"].calibration.z).all()


def test_every_make_target_that_is_named_exists(repository, documents):
    targets = set(re.findall(r"^([a-z0-9-]+):", (repository / "Makefile").read_text(), flags=re.MULTILINE))
    named = {target for text in documents.values() for target in re.findall(r"\bmake ([a-z0-9-]+)", text)}
    assert {"needle", "train", "test", "test-all", "check"} <= named <= targets


def test_modules_and_configs_that_are_named_exist(repository, documents):
    text = "".join(documents.values()) + (repository / "Makefile").read_text()
    modules = set(re.findall(r"-m (experiments(?:\.\w+)+)", text))
    configs = set(re.findall(r"--config=(configs/\w+\.py)", text))
    assert modules and configs
    missing = [name for name in modules if not (repository / (name.replace(".", "/") + ".py")).exists()]
    assert not missing + [name for name in configs if not (repository / name).exists()]


def test_modules_that_code_names_in_words_exist(repository):
    """Docstrings, comments and messages of configs/ and experiments/: commands, and configs that they begin with."""
    files = [path for folder in ("configs", "experiments") for path in sorted((repository / folder).rglob("*.py"))]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    modules = set(re.findall(r"-m (experiments(?:\.\w+)+)", text))
    configs = set(re.findall(r"\b(configs/\w+\.py)", text)) - {"configs/NAME.py"}
    assert len(modules) > 10 and len(configs) > 10
    missing = [name for name in modules if not (repository / (name.replace(".", "/") + ".py")).exists()]
    assert not missing + [name for name in configs if not (repository / name).exists()]


def test_links_lead_to_files(repository, documents):
    links = [link for text in documents.values() for link in re.findall(r"\]\(([^)#]+)\)", text)]
    assert [link for link in links if "://" not in link and not (repository / link).exists()] == []


def test_the_version_is_one(repository, documents):
    citation = (repository / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, flags=re.MULTILINE)[1] == vj.__version__
    assert re.search(r"^## (\S+)", documents["CHANGELOG.md"], flags=re.MULTILINE)[1] == vj.__version__


def test_the_computed_bytes_are_what_the_spec_says(documents):
    def spec(capacity):
        return vj.CacheSpec(512, 64, 32, 192**-0.5, capacity)

    for capacity in (131072, 1048576):
        dense, ours = 7 * capacity * 1152 / 2**30, 7 * spec(capacity).nbytes(1)["total"] / 2**30
        assert f"{ours:.2f} GiB" in documents["README.md"]
        assert f"{dense:.2f}" in documents["README.md"]
    per_row = 1152 / 32 + 260 * 31 / 32 + 0.005 * 1152
    assert f"{per_row:.0f} bytes" in documents["README.md"]
    assert f"{7 * 1048576 * per_row / 2**30:.1f} GiB" in documents["README.md"]
