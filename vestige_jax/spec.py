"""Every constant of the method, validated once and static under jit (VestigeKV §2-§3)."""

import dataclasses
import fractions
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from kernels_pallas.api import IMPLEMENTATIONS
from kernels_pallas.blocks import device
from kernels_pallas.words import branch_copied, row_words

_CHOICES = {
    "overflow": ("dense", "truncate"),
    "index": ("sketch", "balanced"),
    "index_bits": (16, 8, 4),
    "archive_memory": ("device",),
    "recall": ("certified", "none"),
    "bound": ("calibrated", "sound"),
    "calibration": ("prompt", "decode"),
    "implementation": (None, *IMPLEMENTATIONS),
}


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shapes and constants of one layer's VestigeKV cache. Hashable: pass it as a static argument.

    Shapes
      latent_dim      R, width of the RMS-normed latent, which is also the value.
      branch_dim      P, width of the decoupled branch; a row is C = R + P numbers, [latent | branch].
      num_heads       H, query heads.
      scale           softmax scale, applied inside every op: queries are passed unscaled.
      capacity        most tokens a sequence may hold.
    Tier 1 (§2)
      block           rows closed, ranked and indexed together.
      ratio, budget   tier 1 keeps round(ratio * closed) rows, or `budget`, besides the sinks; neither: ratio 1/32.
      kappa           Fourier bins of the low-pass; None: 16 scaled to the block.
      sinks           first rows of a sequence, always kept.
      merged          W, most rows that stand for several others (`merge_rows`), a baseline; 0 (none) costs nothing.
    Tier 2 (§3)
      recall          'certified', 'none' (tier 1 and tail alone), or another rule: see vestige_jax.recall.Rule.
      index           kind of index: 'sketch', the paper's, or 'balanced' (§8), fitted to queries and rows.
      rank            K, dimensions of a code: of a sketch 0 (branch only) to R, beside the branch; balanced 1 to C.
      index_bits      of a code's number: 16 (floats), 8 or 4 (whole steps, their size fixed at calibration).
      shrinkage       of a balanced index: share of the mean eigenvalue that is added to every one.
      fetch           F, most rows fetched by one sequence in one step.
      overflow        when more than F rows fire: 'dense' attends everything, 'truncate' the F largest margins.
      top_j           at most this many fired rows a head; None: all.
      bound           'calibrated' (conformal z), or 'sound' (z = sqrt(R - K), no gate, rounding included).
      calibration     'prompt': only `calibrate` sets the index; 'decode': also decode queries, at steps 8, 16, 32, 64.
      recall_target   tau, the calibrated share of hard queries whose row is fetched.
      z_max           largest calibrated z, and the provisional one.
      activation      sequences shorter than this many tokens are served dense.
    Storage and execution
      dtype           of rows: float32 or bfloat16.
      sketch_dtype    of codes of 16 bits (or float32); None: float16, on TPU bfloat16.
      archive_memory  'device'.
      implementation  of scan and attend: None or "xla", "mosaic_tpu", "mosaic_gpu" (see kernels_pallas.resolve).
      stats           False removes the statistics from the compiled program (faults stay).
      allow_rope      True lets rows with a rotated branch in, as the control arm; a model checks it, no cache op does.
      trace           True adds to the statistics which archived rows each step attended.

    Raises ValueError naming the field, its value and what would be right.
    """

    latent_dim: int
    branch_dim: int
    num_heads: int
    scale: float
    capacity: int
    _: dataclasses.KW_ONLY
    block: int = 4096
    ratio: float | None = None
    budget: int | None = None
    kappa: int | None = None
    sinks: int = 4
    merged: int = 0
    rank: int = 64
    fetch: int = 4096
    overflow: str = "dense"
    top_j: int | None = None
    recall_target: float = 0.9
    z_max: float = 8.0
    activation: int = 0
    dtype: jnp.dtype = jnp.bfloat16
    index: str = "sketch"
    index_bits: int = 16
    shrinkage: float = 0.01
    sketch_dtype: jnp.dtype | None = None
    archive_memory: str = "device"
    implementation: str | None = None
    recall: str | Callable = "certified"
    bound: str = "calibrated"
    calibration: str = "prompt"
    stats: bool = True
    trace: bool = False
    allow_rope: bool = False

    def __post_init__(self):
        self._check_sizes()
        self._check_tier1()
        self._check_choices()
        object.__setattr__(self, "dtype", _float_dtype("dtype", self.dtype, ("float32", "bfloat16")))
        if self.sketch_dtype is not None:
            allowed = ("float16", "bfloat16", "float32")
            object.__setattr__(self, "sketch_dtype", _float_dtype("sketch_dtype", self.sketch_dtype, allowed))

    def _check_sizes(self):
        for name in ("latent_dim", "branch_dim", "num_heads", "capacity", "block", "fetch", "index_bits"):
            _require_int(name, getattr(self, name), 1)
        for name in ("sinks", "merged", "rank", "activation"):
            _require_int(name, getattr(self, name), 0)
        for name in ("budget", "kappa", "top_j"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        for name in ("scale", "z_max", "shrinkage"):
            value = getattr(self, name)
            if not (_is_number(value) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} must be a positive finite number")
        self._check_rank()
        if not (_is_number(self.recall_target) and 0 < self.recall_target < 1):
            raise ValueError(f"recall_target={self.recall_target!r} must lie strictly between 0 and 1")

    def _check_rank(self):
        if self.index == "balanced" and not 1 <= self.rank <= self.row_dim:
            raise ValueError(f"rank={self.rank} of a balanced index must lie in 1..{self.row_dim}, the width of a row")
        if self.index != "balanced" and self.rank > self.latent_dim:
            raise ValueError(f"rank={self.rank} must be at most latent_dim={self.latent_dim}")
        if self.index_bits == 4 and self.rank % 2:
            raise ValueError(f"rank={self.rank} must be even for index_bits=4: two numbers share a byte")

    def _check_tier1(self):
        if self.ratio is not None and self.budget is not None:
            raise ValueError(f"ratio={self.ratio!r} and budget={self.budget!r} are both given: give one of them")
        if self.ratio is not None and not (_is_number(self.ratio) and 0 < self.ratio <= 1):
            raise ValueError(f"ratio={self.ratio!r} must lie in (0, 1]: the kept share of closed rows, 1/32 for 32x")
        if 2 * self.lowpass_bins - 1 >= self.block:
            raise ValueError(
                f"kappa={self.lowpass_bins} with block={self.block}: 2*kappa-1 must be below block, or sigma is 0"
            )

    def _check_choices(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed and not (name == "recall" and callable(self.recall)):
                raise ValueError(f"{name}={getattr(self, name)!r} is not available; choose from {list(allowed)}")
        for name in ("stats", "trace", "allow_rope"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    @property
    def row_dim(self) -> int:
        """C = R + P."""
        return self.latent_dim + self.branch_dim

    @property
    def lowpass_bins(self) -> int:
        """kappa, by default 16 bins at block 4096 and in proportion elsewhere."""
        return self.kappa or max(1, math.floor(16 * self.block / 4096 + 0.5))

    @property
    def archive_rows(self) -> int:
        """A: rows of whole blocks that fit in the capacity."""
        return self.capacity // self.block * self.block

    @property
    def tier1_rows(self) -> int:
        """M: the largest keep set, sinks included."""
        return self.keep_count(self.archive_rows) + self.sinks

    @property
    def tier1_slots(self) -> int:
        """Room for M rows in groups of 8, as devices copy them: a kernel would first pad the whole tier."""
        return -(-self.tier1_rows // 8) * 8

    @property
    def fetch_widths(self) -> tuple[int, ...]:
        """Static gather widths; a step runs at the smallest that fits what fired."""
        most = min(self.fetch, self.archive_rows)
        return tuple(sorted({0, min(64, most), min(512, most), most}))

    @property
    def index_dtype(self) -> np.dtype:
        """Storage dtype of sketches; the TPU compiler refuses float16 loads."""
        if self.sketch_dtype is not None:
            return self.sketch_dtype
        return np.dtype(jnp.bfloat16 if device().platform == "tpu" else jnp.float16)

    @property
    def copied_branch(self) -> int:
        """Numbers of the branch that stand before a sketch in the code, for a TPU to read them there; else 0."""
        sketch = self.index == "sketch" and self.index_bits == 16
        return self.branch_dim if sketch and branch_copied(self.dtype, self.index_dtype) else 0

    @property
    def branch_apart(self) -> int:
        """Numbers of the branch in a copy of its own: a CPU finds its few bytes in float32 rows too slowly. Else 0."""
        wide = self.index == "sketch" and self.dtype == np.float32
        return self.branch_dim if wide and device().platform == "cpu" else 0

    @property
    def free_dims(self) -> int:
        """Dimensions that a code does not see: R - K of a sketch, C - K of a balanced index."""
        return (self.row_dim if self.index == "balanced" else self.latent_dim) - self.rank

    @property
    def steps(self) -> int:
        """Step sizes that a sequence holds: one for each dimension of a code of few bits, none for floats."""
        return self.rank if self.index_bits < 16 else 0

    @property
    def code_layout(self) -> tuple[int, np.dtype]:
        """Length and dtype of a row's code as stored; 4-bit numbers share bytes. A TPU has a branch first."""
        if self.index_bits == 16:
            return self.copied_branch + self.rank, self.index_dtype
        return (self.rank, np.dtype(np.int8)) if self.index_bits == 8 else (self.rank // 2, np.dtype(np.uint8))

    @property
    def certificate_terms(self) -> int:
        """E: bound terms a row stores: eta, and in the sound mode rounding, for a balanced index in two parts."""
        if self.bound != "sound":
            return 1
        return 3 if self.index == "balanced" else 2

    @property
    def provisional_z(self) -> float:
        """z before calibration. In the sound mode z is 1 and stays so: the prepared residual is the bound itself."""
        return 1.0 if self.bound == "sound" else self.z_max

    @property
    def query_buffer(self) -> int:
        """Decode queries held for calibration."""
        return 64 if self.calibration == "decode" else 0

    @property
    def coverage(self) -> fractions.Fraction:
        """tau_s = tau / (1 - alpha), alpha = (1 - tau) / 2: exact, 18/19 at tau = 0.9 (§3)."""
        tau = fractions.Fraction(self.recall_target).limit_denominator(1000)
        return 2 * tau / (1 + tau)

    @property
    def gate_quantile(self) -> float:
        """alpha = (1 - tau) / 2."""
        return (1 - self.recall_target) / 2

    def keep_count(self, closed: int) -> int:
        """m: rows kept besides the sinks when `closed` rows are closed (§2)."""
        return keep_count(closed, self.ratio, self.budget)

    @property
    def _map_floats(self) -> int:
        return 2 * self.row_dim**2 + 1 if self.index == "balanced" else self.latent_dim * self.rank

    def nbytes(self, batch: int) -> dict[str, int]:
        """Bytes of every part of a cache for `batch` sequences, before anything is allocated, and their 'total'."""
        _require_int("batch", batch, 1)
        query = self.num_heads * self.row_dim * self.dtype.itemsize
        row = row_words(self.row_dim) * self.dtype.itemsize
        numbers, kind = self.code_layout
        code = numbers * kind.itemsize + self.branch_apart * self.dtype.itemsize
        per_sequence = {
            "tail": self.block * row + 4,
            "tier1": self.tier1_slots * (row + 4) + 4,
            "archive": self.archive_rows * (row + 4 + 1) + 4,
            "index": self.archive_rows * (code + 4 * self.certificate_terms) + 4 * (self.steps + self._map_floats),
            "calibration": self.query_buffer * (query + 4) + 4 + 4 + 1 + 4 + 1,
            "fault": 4,
            "merged": 4 * self.merged * (self.latent_dim + self.row_dim + 1) + 4 * (self.merged > 0),
        }
        sizes = {name: batch * size for name, size in per_sequence.items()}
        return sizes | {"total": sum(sizes.values())}


def keep_count(closed: int, ratio: float | None, budget: int | None) -> int:
    """m = max(1, floor(ratio * closed + 1/2)), or the budget (§2)."""
    if budget is not None:
        return budget
    return max(1, math.floor((1 / 32 if ratio is None else ratio) * closed + 0.5))


def _is_number(value) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _require_int(name: str, value, least: int):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}")


def _float_dtype(name: str, value, allowed: tuple[str, ...]) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not a dtype; choose from {list(allowed)}") from None
    if dtype.name not in allowed:
        raise ValueError(f"{name}={dtype.name!r} is not supported; choose from {list(allowed)}")
    return dtype
