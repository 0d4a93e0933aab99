"""Recall tiers of other methods, by the name written after '+' in a method's name."""

from vestige_jax.baselines.arkvale import ArkVale
from vestige_jax.baselines.pages import Pages
from vestige_jax.baselines.quest import Quest

PAGES: dict[str, Pages] = {
    "quest": Quest(),
    "arkvale": ArkVale(),
    "arkvale_mean": ArkVale(radius="mean"),
    "arkvale_cuboid": ArkVale(volume="cuboid"),
    "arkvale_cuboid_mean": ArkVale(volume="cuboid", radius="mean"),
}
