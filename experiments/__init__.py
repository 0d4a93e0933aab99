"""Drivers: one short program per question, over the machinery in ``runner``, ``rows``, ``stats`` and ``plots``."""
