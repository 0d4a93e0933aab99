"""What every test shares."""

import pathlib

import hypothesis
import jax
import pytest

# Property tests draw the same examples on every run, and a first call that compiles is not a slow example.
hypothesis.settings.register_profile("vestige", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("vestige")


# Linux grants a process 65,530 memory maps and every compiled program takes three: out of maps, the compiler crashes.
MOST_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drops what was compiled once there is much of it."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The root of the checkout."""
    return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden(repository) -> pathlib.Path:
    """The folder of reference arrays."""
    return repository / "tests" / "golden"


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that spend their time in the compiler, on tiny shapes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
