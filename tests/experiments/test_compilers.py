"""Where the compilers come from: a folder of their own, by the installed jax."""

import subprocess

import jax
import jax.numpy as jnp
import pytest

from experiments import compilers
from experiments.harness.rows import UserError


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """No compiler is there, and pip is replaced: it notes its command."""
    commands = []

    def pip(command, **_):
        commands.append(command)
        command[command.index("--target") + 1].mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(compilers, "ROOT", tmp_path)
    monkeypatch.setattr(compilers, "FOLDER", tmp_path / ".aot")
    monkeypatch.setattr(subprocess, "run", pip)
    return commands


@pytest.mark.parametrize("target, name", [("tpu:v5e:2x2", "tpu"), ("tpu:v5p:4x4x8", "tpu"), ("h200", "h200")])
def test_targets(target, name):
    assert compilers.platform(target) == name


@pytest.mark.parametrize("target", ["", "tpu", "h200:1", "a100", "gpu:h200", "tpu:v9", "tpu:v9:2x2",
                                    "tpu:v5e", "tpu:v5e:2", "tpu:v5e:2x2:1"])  # fmt: skip
def test_a_target_that_is_not_known_is_named_beside_those_that_are(target):
    with pytest.raises(UserError, match=f"--target={target} is not known; known are h200, tpu:v4:2x2x1, tpu:v5e:2x2, "):
        compilers.platform(target)


@pytest.mark.parametrize(
    "version, tpu, h200",
    [("0.10.2", "libtpu==0.0.42.*", "jax-cuda13-plugin==0.10.2.*"),
     ("0.12.0.1", "libtpu==0.0.50.*", "jax-cuda13-plugin==0.12.0.*")],
)  # fmt: skip
def test_the_compiler_fits_the_installed_jax(version, tpu, h200, monkeypatch):
    monkeypatch.setattr(compilers.importlib.metadata, "version", lambda package: version)
    assert compilers.packages("tpu") == [tpu]
    assert compilers.packages("h200")[0] == h200


def test_an_unknown_jax_has_no_compiler(monkeypatch):
    monkeypatch.setattr(compilers.importlib.metadata, "version", lambda package: "9.1.0")
    with pytest.raises(UserError, match=r"jax 9.1.0: no libtpu is known"):
        compilers.packages("tpu")


def test_a_compiler_is_fetched_once_into_its_own_folder(empty):
    compilers.fetch("tpu")
    (command,) = empty
    assert command[1:4] == ["-m", "pip", "install"] and "--no-deps" in command
    assert command[command.index("--target") + 1] == compilers.folder("tpu")
    assert command[-1] in compilers._LIBTPU.values()
    compilers.fetch("tpu")
    assert len(empty) == 1
    path = compilers.environment("tpu")
    assert path["PYTHONPATH"].startswith(str(compilers.folder("tpu"))) and path["JAX_PLATFORMS"] == "cpu"


def test_what_could_not_be_fetched_is_not_there(empty, monkeypatch):
    with pytest.raises(UserError, match="make aot-h200 fetches it"):
        compilers.environment("h200")
    (compilers.folder("h200")).mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match="pip could not fetch jax-cuda13-plugin"):
        compilers.fetch("h200")
    with pytest.raises(UserError, match="the compiler is missing"):
        compilers.environment("h200")


def test_declared_bytes_leave_out_conditionals_and_plain_programs():
    from jax.experimental import pallas as pl

    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def kernel(x):
        estimate = pl.CostEstimate(flops=0, bytes_accessed=64, transcendentals=0)
        return pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=estimate)(x)

    def declared(function):
        return compilers._declared(jax.make_jaxpr(function)(jnp.zeros((8, 128))).jaxpr)

    assert declared(lambda x: x + 1) == 0
    assert declared(lambda x: jax.jit(kernel)(kernel(x)) + 1) == 128
    assert declared(lambda x: jax.lax.cond(x.sum() > 0, kernel, lambda x: x, x)) == 0
