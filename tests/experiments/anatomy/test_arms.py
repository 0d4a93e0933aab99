"""Arms of a comparison: which there are, what is refused, means, differences and tables of their rows."""

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from configs import branch as branch_config
from experiments.anatomy import arms
from experiments.anatomy.arms import Measured
from experiments.harness import tables


def rows(**cells):
    """Rows in the order of measuring: arm=[prompts, layers] of quantity x."""
    return [
        dict(prompt=prompt, arm=arm, layer=layer, quantity="x", value=float(cell[prompt][i]))
        for prompt in range(2)
        for arm, cell in cells.items()
        for i, layer in enumerate((1, 3))
    ]


NOPE, ROPE = [[1, 2], [3, 4]], [[0, 0], [0, 2]]
FOUND = {name: SimpleNamespace(layers=[1, 3]) for name in ("nope", "rope")}


def measured(found=FOUND, **cells):
    return Measured(SimpleNamespace(rows=rows(**cells)), found)


def test_means_and_paired_differences():
    own = measured(nope=NOPE, rope=ROPE)
    mean, gap = own.mean("nope", "x"), own.difference("x")
    assert (mean.value, mean.n, gap.value) == (2.5, 2, 2.0)
    assert (mean.low, mean.high) == (1.5, 3.5)  # two prompts: both draws the first, or the second
    assert (gap.low, gap.high) == (1.5, 2.5)  # prompt by prompt 1.5 and 2.5; unpaired it would reach from 0.5


def test_an_interval_is_of_a_mean_over_all_prompts():
    own = Measured(SimpleNamespace(rows=[]), FOUND)
    own.cells = {("nope", "x"): np.repeat([[0.0, 0.0], [1.0, 1.0]], 50, axis=0)}
    mean = own.mean("nope", "x")
    assert mean.n == 100 and abs(mean.low - 0.4) < 0.03 and abs(mean.high - 0.6) < 0.03


def test_what_was_not_measured_is_unusable():
    own = measured({"nope": FOUND["nope"]}, nope=NOPE)
    for estimate in (own.mean("rope", "x"), own.difference("x")):
        assert estimate.unusable == "there is no arm rope in this run" and estimate.n == 0
    assert own.arms("x") == ["nope"]


def test_the_summary_has_every_layer_and_their_mean():
    summary = measured(nope=NOPE, rope=ROPE).summary()
    assert [(row["arm"], row["layer"], row["value"]) for row in summary] == [
        *(("nope", 1, 2.0), ("nope", 3, 3.0), ("nope", "mean", 2.5)),
        *(("rope", 1, 0.0), ("rope", 3, 1.0), ("rope", "mean", 0.5)),
    ]
    text = tables.render(*arms.table(summary, lambda quantity, layer: "0.68 (Base)" if layer == "mean" else None))
    lines = [line.split("  ") for line in text.splitlines()]
    assert len(lines) == 2 + 3 and "2.5 (1.5 to 3.5)" in text and text.count("0.68 (Base)") == 1


def test_the_arms_of_two_checkpoints(tiny, twins):
    config = tiny(branch_config.get_config())
    found = arms.load(config, turned=True)
    assert list(found) == ["nope", "turned", "rope"]
    assert [arm.rotates for arm in found.values()] == [False, True, True]
    assert found["turned"].model is found["nope"].model and found["rope"].prose is found["nope"].prose
    config.twin = ""
    assert list(arms.load(config)) == ["nope"]
    config.checkpoint = str(twins / "rope")
    assert list(arms.load(config, turned=True)) == ["rope"]


@pytest.mark.parametrize("pair", [("nope", "nope"), ("rope", "nope"), ("rope", "rope")])
def test_a_twin_is_rotated_and_its_partner_is_not(tiny, twins, pair):
    first, second = (str(twins / name) for name in pair)
    config = tiny(branch_config.get_config(), checkpoint=first, twin=second)
    with pytest.raises(ValueError, match="twin=.*must be a rotated model"):
        arms.load(config)


def test_weights_are_of_no_prompt():
    every = [*rows(nope=NOPE), *(dict(prompt=-1, arm="nope", layer=i, quantity="w", value=i / 2) for i in (1, 3))]
    own = Measured(SimpleNamespace(rows=every), {"nope": FOUND["nope"]})
    assert_allclose(own.cells["nope", "w"], [[0.5, 1.5]])
    assert own.mean("nope", "w").low == own.mean("nope", "w").high == 1.0
    assert np.array_equal(own.cells["nope", "x"], NOPE)
