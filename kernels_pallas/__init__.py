"""Scan, compact and attend: the passes over rows that a decode step makes. They know arrays and nothing else."""

from kernels_pallas.api import attend, attend_list, compact, resolve, scan
from kernels_pallas.fetchlist import FetchList, Margins
from kernels_pallas.parts import Part, empty, merge

__all__ = ["FetchList", "Margins", "Part", "attend", "attend_list", "compact", "empty", "merge", "resolve", "scan"]
