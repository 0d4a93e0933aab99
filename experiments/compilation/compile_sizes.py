"""Every kernel at every size that has to work: interpreters accept what a compiler refuses."""

import functools
from collections.abc import Iterator

import jax.numpy as jnp

import kernels_pallas
from experiments.compilation.compile_programs import KERNELS, Program, shape
from experiments.compilers import Compiler
from kernels_pallas.words import row_words

ROWS, BATCH, FETCHED = 4096, 2, 40
SIZES = {(512, 64, 32): (0, 64, 128, 192), (512, 64, 16): (0, 64, 128, 192), (32, 16, 4): (0, 8)}  # and their ranks
FEW_BITS = {(512, 64, 32): ((64, True), (96, False), (256, False)), (512, 64, 16): ((128, False),),
            (32, 16, 4): ((8, True),)}  # fmt: skip # ranks of codes of 8 and 4 bits, and whether the branch is read
WORDS = {"tpu": (jnp.uint16, jnp.uint32), "cuda": (jnp.uint16,)}  # of rows; codes are as wide


def sizes(compiler: Compiler) -> Iterator[Program]:
    """attend, attend_list and scan: latent/branch/heads, rank, and the branch in place or in the code."""
    for (latent, branch, heads), ranks in SIZES.items():
        for word in WORDS[compiler.platform]:
            name = f"size {latent}/{branch}/{heads} {word.__name__}"
            attend = functools.partial(_attend, compiler, latent, branch, heads, word)
            yield Program(f"{name} attend", ROWS, functools.partial(attend, listed=False))
            yield Program(f"{name} attend_list", ROWS, functools.partial(attend, listed=True))
            for rank in ranks:
                scan = functools.partial(_scan, compiler, latent, branch, heads, word, rank)
                yield Program(f"{name} scan, rank {rank}", ROWS, functools.partial(scan, copied=False))
                yield Program(f"{name} scan, rank {rank}, branch copied", ROWS, functools.partial(scan, copied=True))
        for rank, read in FEW_BITS[latent, branch, heads]:
            for bits in (8, 4):
                name = f"size {latent}/{branch}/{heads} scan, rank {rank}, {bits} bits{', branch in place' * read}"
                used = branch if read else 0
                yield Program(name, ROWS, functools.partial(_narrow, compiler, latent, branch, heads, used, rank, bits))


def _attend(compiler, latent, branch, heads, word, *, listed):
    keywords = {"latent_dim": latent, "scale": 1.0, "implementation": KERNELS[compiler.platform]}
    query = shape(BATCH, heads, latent + branch, dtype=_float(word))
    rows, count = _rows(compiler, latent + branch, word), shape(BATCH, dtype=jnp.int32)
    if listed:
        arguments = (query, rows, shape(BATCH, FETCHED, dtype=jnp.int32), count)
        return functools.partial(kernels_pallas.attend_list, **keywords), arguments, ()
    return functools.partial(kernels_pallas.attend, **keywords), (query, rows, count), ()


def _scan(compiler, latent, branch, heads, word, rank, *, copied):
    width, numbers = (0, branch + rank) if copied else (branch, rank)
    code = shape(BATCH, ROWS, numbers, dtype=_float(word) if compiler.platform == "tpu" else jnp.float16)
    return _call(compiler, latent, _rows(compiler, latent + branch, word), (heads, width, numbers), code)


def _narrow(compiler, latent, branch, heads, used, rank, bits):
    code = shape(BATCH, ROWS, rank * bits // 8, dtype=jnp.int8 if bits == 8 else jnp.uint8)
    return _call(compiler, latent, _rows(compiler, latent + branch, jnp.uint16), (heads, used, rank), code)


def _call(compiler, latent, rows, probe, code):
    heads, width, rank = probe
    probe = [shape(BATCH, heads, n) for n in (width, rank, 1)]
    entry, count = (code, shape(BATCH, 1, ROWS), shape(BATCH, ROWS, dtype=bool)), shape(BATCH, dtype=jnp.int32)
    function = functools.partial(kernels_pallas.scan, latent_dim=latent, implementation=KERNELS[compiler.platform])
    return function, (*probe, shape(BATCH, heads), rows, *entry, count), ()


def _rows(compiler, width, word):
    with compiler.tracing():
        return shape(BATCH, ROWS, row_words(width), dtype=word)


def _float(word):
    return jnp.bfloat16 if word == jnp.uint16 else jnp.float32
