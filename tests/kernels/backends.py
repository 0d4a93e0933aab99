"""The backends as a machine can run them: XLA directly, TPU and GPU kernels on their device or interpreted on a CPU."""

import contextlib

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # its verdict on races is not public
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas import blocks

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")
SMALL = blocks.TpuBlocks(attend_rows=128, attend_queries=32, splits=2, gather_rows=16, scan_rows=256)
FEW = blocks.GpuBlocks(  # several blocks of rows to each
    attend_ctas=6, gather_rows=16, scan_ctas=6, register_operands=False
)


# What no interpreter here can run, and why. Of these only the compilers say anything (experiments.compile_report).
NOT_INTERPRETED = {
    "mosaic_gpu on jax 0.10": "its interpreter knows no layout cast and no transposed operand of a tensor core",
    "mosaic_gpu with register_operands": "jax 0.12's interpreter multiplies from shared memory only; the contract runs "
    "attend with its weights there",
}


def tracing_for(platform: str, kind: str):
    """Inside, programs are traced for this device."""
    target = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=target))


@contextlib.contextmanager
def running(backend: str, monkeypatch):
    """Inside, `backend` runs here. The TPU kernels use small blocks, so that every size has several; races raise."""
    if backend == "xla" or jax.default_backend() == {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}[backend]:
        yield  # on the device itself nothing is interpreted
        return
    if backend == "mosaic_gpu":
        if not hasattr(plgpu, "InterpretGPUParams"):
            pytest.skip(NOT_INTERPRETED["mosaic_gpu on jax 0.10"])
        monkeypatch.setattr(blocks, "GpuBlocks", lambda: FEW)
        strict = plgpu.InterpretGPUParams(detect_races=True)  # a race raises
        with tracing_for("gpu", "NVIDIA H200"), plgpu.force_gpu_interpret_mode(strict):
            yield
        return
    monkeypatch.setitem(blocks._TPU, "TPU v5p", SMALL)
    pltpu.reset_tpu_interpret_mode_state()
    with tracing_for("tpu", "TPU v5p"), pltpu.force_tpu_interpret_mode(STRICT):
        yield
    assert interpreter.races is not None, "no kernel ran under the interpreter"
    assert not interpreter.races.races_found
