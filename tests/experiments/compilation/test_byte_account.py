"""The byte account of a step, worked out by hand."""

import pytest

from experiments.compilation import byte_account as account

HOPPER = account.layout("cuda", 512, 64, 64)
TPU = account.layout("tpu", 512, 64, 64)


def test_what_a_device_stores_and_moves():
    assert HOPPER.row == 1152 and HOPPER.branch == HOPPER.code == 128 and HOPPER.passes == 1
    assert TPU.row == 1280 and TPU.in_place == 256 and TPU.together == 8  # 640 numbers for 576, and a tile of 128
    assert account.layout("tpu", 32, 16, 8).row == 256


def test_an_index_of_few_bits_and_no_branch():
    for platform, bits, read in (("cuda", 8, 128), ("tpu", 8, 128), ("cuda", 4, 64), ("tpu", 4, 64)):
        size = account.layout(platform, 512, 64, 128, kind="balanced", bits=bits)
        assert account.scan(size, 1000) == account.scan_in_place(size, 1000) == 1000 * (read + 4 + 1 + 4)
        assert size.maps == 4 * 576 * 576


def test_passes_over_rows():
    assert account.attend(HOPPER, 1000) == 1_152_000
    assert account.scan(HOPPER, 1000) == 1000 * (128 + 128 + 4 + 1 + 4)  # the published 260, membership, and the margin
    assert account.scan(TPU, 1000) == account.scan_in_place(HOPPER, 1000) == 265_000
    assert account.scan_in_place(TPU, 1000) == 393_000
    assert account.fetch(HOPPER, 10) == 11_520 and account.fetch(TPU, 10) == 102_400
    assert account.compact(1280, 2) == 10 * 4 + 2 * 512
    assert account.compact(1280, 4096) == 10 * 4 + 1280 * 4  # all rows, once


def test_the_published_account():
    """rho = 1/32, f = 0.5%, no tail, no margins: 294 bytes for 1152, as published."""
    rows = 320_000
    plain = account.Layout(row=1152, branch=128, in_place=128, code=128, bounds=4)
    parts = account.policy(plain, archive=rows, tier1=rows // 32, tail=0, fetched=rows // 200)
    read = parts["tier 1"] + parts["fetch"] + (parts["scan"] - rows * account.MARGIN) * 31 / 32
    assert read / rows == pytest.approx(293.6, abs=0.1)
    assert account.dense(plain, archive=rows, tail=0) / read == pytest.approx(3.92, abs=0.01)


def test_a_step_counts_its_tail_and_its_padding():
    parts = account.policy(TPU, archive=131072, tier1=4100, tail=4096, fetched=655)
    assert list(parts.values()) == [
        4100 * 1280, 4096 * 1280, 4 * 512 * 64, 131072 * 265, 1024 * 4 + 655 * 512, 655 * 8 * 1280,
    ]  # fmt: skip
    assert account.dense(TPU, archive=131072, tail=4096) == 135168 * 1280
