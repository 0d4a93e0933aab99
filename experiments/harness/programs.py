"""Compiled programs of a long run: each takes memory maps, of which Linux gives a process 65,530."""

import gc
import pathlib

import jax

MOST = 30_000
"""Maps; a driver that holds more lets its programs go. They compile again where they are needed."""


def drop_many(most: int = MOST) -> bool:
    """Drops every compiled program if this process holds more than `most` memory maps; whether it did."""
    maps = pathlib.Path("/proc/self/maps")
    if not maps.exists():  # no Linux, no such bound
        return False
    with maps.open("rb") as lines:
        many = sum(1 for _ in lines) > most
    if many:
        gc.collect()
        jax.clear_caches()
    return many
