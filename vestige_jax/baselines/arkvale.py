"""ArkVale (Chen et al., NeurIPS 2024): pages by the best score in a volume around their rows."""

import dataclasses

import jax
import jax.numpy as jnp

from vestige_jax.baselines.pages import Pages, box, dot

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ArkVale(Pages):
    """Sphere q.c + rho ||q||, or cuboid sum_d max(q_d (c_d + r_d), q_d (c_d - r_d)), around a page (VestigeKV §5).

    The centre c is the midpoint of the page's box. The radius (rho of the sphere, r_d of each side of the cuboid) is a
    row's largest distance from it, which makes the score a bound, or the mean distance, a heuristic.
    Adapted to one latent row for all heads: a page is fetched for all of them.
    Raises ValueError for another radius or volume.
    """

    page: int = 32
    radius: str = "max"
    volume: str = "sphere"

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("radius", ("max", "mean")), ("volume", ("sphere", "cuboid"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose {' or '.join(known)}")

    @property
    def bound(self) -> bool:
        """The volume holds every row."""
        return self.radius == "max"

    def digest(self, rows: Array, live: Array) -> tuple[Array, Array]:
        """Centre [..., G, C], and radius: [..., G, 1] of spheres, [..., G, C] of cuboids."""
        low, high = box(rows, live)
        centre = (low + high) / 2
        distance = jnp.abs(rows - centre[..., None, :])
        if self.volume == "sphere":
            distance = jnp.linalg.norm(distance, axis=-1, keepdims=True)
        distance = jnp.where(live[..., None], distance, 0)
        if self.radius == "max":
            return centre, distance.max(-2)
        return centre, distance.sum(-2) / jnp.maximum(live.sum(-1)[..., None], 1)

    def score(self, digest: tuple[Array, Array], query: Array) -> Array:
        """The largest <q, x> for x in the volume."""
        centre, radius = digest
        reach = jnp.linalg.norm(query, axis=-1, keepdims=True) if self.volume == "sphere" else jnp.abs(query)
        return dot(query, centre) + dot(reach, radius)
