"""Scan and attend: the two passes over rows that a decode step makes. They know arrays and nothing else."""

from kernels_pallas.api import attend, scan
from kernels_pallas.parts import Part, empty, merge

__all__ = ["Part", "attend", "empty", "merge", "scan"]
