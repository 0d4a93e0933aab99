"""The compilers of devices that this machine need not have: where they come from, and how a program is given to them.

    python -m experiments.compilers tpu     fetches the compiler that fits the installed jax into .aot/
    python -m experiments.compilers h200

A TPU's compiler is libtpu, Hopper's is jax's CUDA plugin with its ptxas. Nothing is executed, and both run on a CPU.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time

from experiments.harness.rows import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".aot"
_LIBTPU = {"0.10": "libtpu==0.0.42.*", "0.12": "libtpu==0.0.50.*"}  # by jax release
_TPUS = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}  # and a slice of each
_TPU_ENVIRONMENT = {  # read by libtpu as it starts: the machine it thinks it is on
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs on a TPU: two of us may compile at once
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def platform(target: str) -> str:
    """'tpu' or 'h200' of a target like tpu:v5e:2x2. Raises UserError for any other, whatever compilers are there."""
    if target == "h200":
        return target
    device, *slice_ = target.split(":")
    if device == "tpu" and len(slice_) == 2 and slice_[0] in _TPUS and re.fullmatch(r"\d+(x\d+)+", slice_[1]):
        return device
    known = ", ".join(f"tpu:{name}:{size}" for name, size in _TPUS.items())
    raise UserError(f"--target={target} is not known; known are h200, {known} and slices of other sizes")


def packages(name: str) -> list[str]:
    """The requirements that hold the compiler for the installed jax."""
    version = importlib.metadata.version("jax")
    if name == "h200":
        release = ".".join(version.split(".")[:3])
        return [f"jax-cuda13-plugin=={release}.*", f"jax-cuda13-pjrt=={release}.*"]
    release = ".".join(version.split(".")[:2])
    if release not in _LIBTPU:
        raise UserError(f"jax {version}: no libtpu is known for it; known are {sorted(_LIBTPU)}")
    return [_LIBTPU[release]]


def version(target: str) -> str:
    """What compiles, with its version. Only in a process that runs in `environment`."""
    package = "libtpu" if platform(target) == "tpu" else "jax-cuda13-plugin"
    return f"{package} {importlib.metadata.version(package)}"


def installed(name: str) -> bool:
    """Whether the environment of the caller has the compiler: on a machine with such a device."""
    module = "libtpu" if name == "tpu" else "jax_plugins.xla_cuda13"
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even jax_plugins
        return False


def folder(name: str) -> pathlib.Path:
    """Where the compiler is kept, one folder for each jax."""
    return FOLDER / f"{name}-jax{importlib.metadata.version('jax')}"


def fetch(name: str) -> None:
    """Install the compiler into its folder, unless it is there; it never touches the environment of the caller.

    Raises UserError where pip fails: without a network, say.
    """
    place = folder(name)
    if (place / "complete").exists() or installed(name):
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", place]
    print(f"fetching {' '.join(packages(name))} into {place.relative_to(ROOT)}", flush=True)
    if subprocess.run([*command, *packages(name)]).returncode:
        raise UserError(f"pip could not fetch {' '.join(packages(name))}; it says why above")
    (place / "complete").touch()


def environment(name: str) -> dict[str, str]:
    """The environment of a process that compiles. Raises UserError if the compiler is neither installed nor fetched."""
    place = folder(name)
    if not (place / "complete").exists() and not installed(name):
        raise UserError(f"the compiler is missing: make aot-{name} fetches it into {place.relative_to(ROOT)}")
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | (_TPU_ENVIRONMENT if name == "tpu" else {})


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a device's compiler says of one program."""

    seconds: float
    device_bytes: int  # arguments, outputs that reuse none of them, and temporaries
    temporary_bytes: int
    bytes_accessed: int | None  # None: the compiler does not say
    declared_bytes: int | None  # what its kernels read and write, by their own account; None: none, or one says nothing


class Compiler:
    """The compiler of one device of a target. Only in a process that runs in `environment`."""

    def __init__(self, target: str):
        from jax.experimental import topologies

        self.platform = "tpu" if platform(target) == "tpu" else "cuda"
        if self.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=target.split(":", 1)[1])
        else:
            config = (ROOT / "experiments" / "targets" / "h200.txtpb").read_text()
            described = topologies.get_topology_desc(
                topology_name="cuda_topo", platform="cuda", topology="1x1x1", target_config=config
            )
        self.device = described.devices[0]

    def tracing(self) -> contextlib.AbstractContextManager:
        """Inside, programs are traced for the device."""
        import jax
        from jax.sharding import AbstractDevice, AbstractMesh

        kind, cores = ("NVIDIA H200", 132) if self.platform == "cuda" else (self.device.device_kind, 1)
        name = "gpu" if self.platform == "cuda" else "tpu"
        target = AbstractDevice(device_kind=kind, num_cores=cores, platform=name)
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=target))

    def shapes(self, function, *arguments):
        """The shapes that function returns, traced for the device."""
        import jax

        with self.tracing():
            return jax.eval_shape(function, *arguments)

    def compile(self, function, *arguments, donate=()) -> Compiled:
        """Compile function for arguments, a pytree of shapes on one device."""
        import jax

        place = jax.sharding.SingleDeviceSharding(self.device)
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
        start = time.perf_counter()
        with self.tracing():
            traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
            compiled = traced.lower(lowering_platforms=(self.platform,)).compile()
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return Compiled(
            seconds=time.perf_counter() - start,
            device_bytes=held + memory.temp_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            bytes_accessed=int(cost["bytes accessed"]) if cost.get("bytes accessed") else None,
            declared_bytes=_declared(traced.jaxpr.jaxpr) or None,
        )


def _declared(jaxpr) -> int | None:
    """Bytes that the kernels of a program declare, conditionals left out."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            cost = equation.params["cost_estimate"]
            inner = None if cost is None else cost.bytes_accessed
        elif equation.primitive.name in ("cond", "while", "scan"):
            inner = 0
        elif equation.primitive.name in ("mpmd_map", "core_map"):
            inner = None
        else:
            bodies = [p for p in equation.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            each = [_declared(getattr(body, "jaxpr", body)) for body in bodies]
            inner = None if None in each else sum(each)
        if inner is None:
            return None
        total += inner
    return total


if __name__ == "__main__":
    if sys.argv[1:] not in (["tpu"], ["h200"]):
        sys.exit((__doc__ or "").strip())
    try:
        fetch(sys.argv[1])
    except UserError as error:
        sys.exit(f"error: {error}")
