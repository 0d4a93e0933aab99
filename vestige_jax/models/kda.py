"""Kimi Delta Attention: a gated delta rule with a decay per key channel.

One head keeps a state S [K, V] in float32. For each token, in this order:

    S <- exp(g)[:, None] * S          decay, before the read
    u  = beta (v - S^T k)             what the state does not yet say about v
    S <- S + k u^T
    o  = S^T q                        read after the update

`recur` is that recurrence for one token, `chunked` the same for a whole sequence in blocks of C tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vestige_jax.models.config import ModelConfig
from vestige_jax.models.layers import kernel, rms

CHUNK = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDAState:
    """What one KDA layer carries from token to token.

    memory: float32 [B, H, K, V], the recurrent state (key axis first).
    window: [B, W-1, 3, H, K], the last W-1 inputs of the short convolutions of q, k and v, oldest first; zeros before
      the first token.
    """

    memory: Array
    window: Array


def recur(q: Array, k: Array, v: Array, g: Array, beta: Array, memory: Array) -> tuple[Array, Array]:
    """One token. q, k, g [B,H,K], v [B,H,V], beta [B,H], memory [B,H,K,V]; all float32. Returns (o [B,H,V], memory)."""
    memory = jnp.exp(g)[..., None] * memory
    u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", memory, k))
    memory = memory + k[..., None] * u[..., None, :]
    return jnp.einsum("bhkv,bhk->bhv", memory, q), memory


def chunked(
    q: Array, k: Array, v: Array, g: Array, beta: Array, memory: Array, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """The recurrence over T tokens, C = `chunk` of them at a time (a power of two; fewer for a shorter T).

    With G the running sum of g inside a chunk, D_ij = exp(G_i - G_j) per key channel, A_ij = beta_i <k_i, D_ij k_j> for
    j < i, and X = (I + A)^-1:

        U = X (beta v),  Y = X (beta exp(G) k),  v' = U - Y S
        o_i = S^T (exp(G_i) q_i) + sum_{j<=i} <q_i, D_ij k_j> v'_j
        S  <- exp(G_C) S + sum_j (exp(G_C - G_j) k_j) v'_j^T

    Every exponent is a difference that cannot be positive, so no decay is too fast for float32.

    Args: q, k, g [B,T,H,K]; v [B,T,H,V]; beta [B,T,H]; memory [B,H,K,V]; float32. A token with g = 0 and beta = 0
      leaves the memory as it is: that is how padding is passed.
    Returns: (o [B,T,H,V], memory).
    """
    length = q.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    q, k, v, g, beta = (_split(x, chunk) for x in (q, k, v, g, beta[..., None]))
    inverse, among_queries, since, until = _triangles(q, k, beta, g)
    solved = inverse @ (beta * jnp.concatenate([v, jnp.exp(since) * k], axis=-1))
    u, y = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    steps = (u, y, jnp.exp(since) * q, jnp.exp(until) * k, jnp.exp(since[..., -1, :]), among_queries)
    memory, out = jax.lax.scan(_advance, memory, steps)
    batch, heads, width = out.shape[1], out.shape[2], out.shape[-1]
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(batch, -1, heads, width)
    return out[:, :length], memory


def _split(x: Array, chunk: int) -> Array:
    """[B,T,H,K] -> [N,B,H,C,K], padded with zeros at the end."""
    batch, length, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % chunk), (0, 0), (0, 0)))
    return jnp.transpose(x.reshape(batch, -1, chunk, heads, width), (1, 0, 3, 2, 4))


def _triangles(q: Array, k: Array, beta: Array, g: Array) -> tuple[Array, Array, Array, Array]:
    """(I + A)^-1 with A_ij = beta_i <k_i, D_ij k_j> for j < i, and <q_i, D_ij k_j> for j <= i: two [..., C, C].

    Built by doubling: two solved diagonal blocks of size s and the s x s block below them give one of size 2s,

        [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]].

    (A power series of A would be as short, but loses all its digits on repeated keys.) The decay from j in the first
    half to i in the second is a product at the boundary, exp(until_j) exp(since_i): matrix products only, and no
    positive exponent. Both sums grow with the blocks, so none is a difference of large numbers; at the end they are the
    third and fourth result, since_i = sum_{t<=i} g_t and until_i = sum_{t>i} g_t within the chunk.
    """
    chunk = k.shape[-2]
    inverse = jnp.ones((*k.shape[:-1], 1, 1), k.dtype)
    among_queries = jnp.sum(q * k, axis=-1)[..., None, None]
    since, until = g[..., None, :], jnp.zeros_like(g)[..., None, :]
    size = 1
    while size < chunk:
        k0, (q1, k1, b1) = _half(k, size, 0), (_half(x, size, 1) for x in (q, k, beta))
        (s0, s1), (u0, u1) = _pair(since), _pair(until)
        left, fall = jnp.swapaxes(k0 * jnp.exp(u0), -1, -2), jnp.exp(s1)
        (first, second), (upper, lower) = _pair(inverse), _pair(among_queries)
        inverse = _join(first, -(second @ (b1 * fall * k1 @ left) @ first), second)
        among_queries = _join(upper, fall * q1 @ left, lower)
        since = jnp.concatenate([s0, s0[..., -1:, :] + s1], axis=-2)
        until = jnp.concatenate([u0 + s1[..., -1:, :], u1], axis=-2)
        size *= 2
    return inverse[..., 0, :, :], among_queries[..., 0, :, :], since[..., 0, :, :], until[..., 0, :, :]


def _half(x: Array, size: int, which: int) -> Array:
    """One half of every block of 2 * size tokens: [..., C, K] -> [..., C / (2 size), size, K]."""
    return x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])[..., which, :, :]


def _pair(blocks: Array) -> tuple[Array, Array]:
    """First and second of every two blocks [..., N, s, s]."""
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def _join(first: Array, below: Array, second: Array) -> Array:
    """[[first, 0], [below, second]]."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _advance(memory: Array, step) -> tuple[Array, Array]:
    """Carries the memory [B,H,K,V] over one chunk and reads its outputs [B,H,C,V]."""
    u, y, q, k, decay, among_queries = step
    fresh = u - y @ memory
    out = q @ memory + among_queries @ fresh
    return decay[..., None] * memory + jnp.swapaxes(k, -1, -2) @ fresh, out


class KDA(nnx.Module):
    """The layer: projections, short convolutions, gates, the recurrence, gated output norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        width, heads, dim = config.hidden_size, config.kda_num_heads, config.kda_head_dim
        taps = config.short_conv_kernel_size
        self.q_proj = kernel(rngs, (width, heads, dim), width, dtype)
        self.k_proj = kernel(rngs, (width, heads, dim), width, dtype)
        self.v_proj = kernel(rngs, (width, heads, dim), width, dtype)
        self.q_conv1d = kernel(rngs, (taps, heads, dim), taps, dtype)
        self.k_conv1d = kernel(rngs, (taps, heads, dim), taps, dtype)
        self.v_conv1d = kernel(rngs, (taps, heads, dim), taps, dtype)
        # The decay's own parameters stay float32 whatever `dtype` is: they sit inside two exponentials.
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)))
        self.dt_bias = nnx.Param(_initial_dt_bias(rngs, (heads, dim)))
        self.f_a_proj = kernel(rngs, (width, dim), width, dtype)
        self.f_b_proj = kernel(rngs, (dim, heads, dim), dim, dtype)
        self.b_proj = kernel(rngs, (width, heads), width, dtype)
        self.g_a_proj = kernel(rngs, (width, dim), width, dtype)
        self.g_b_proj = kernel(rngs, (dim, heads, dim), dim, dtype)
        self.o_norm = nnx.Param(jnp.ones((dim,), dtype))
        self.o_proj = kernel(rngs, (heads, dim, width), heads * dim, dtype)
        self.eps = config.rms_norm_eps

    def init_state(self, batch: int) -> KDAState:
        """The state before the first token."""
        taps, heads, dim = self.q_conv1d.shape
        window = jnp.zeros((batch, taps - 1, 3, heads, dim), self.q_proj.dtype)
        return KDAState(jnp.zeros((batch, heads, dim, dim), jnp.float32), window)

    def __call__(self, x: Array) -> Array:
        """Dense forward of [B,T,D] from an empty state."""
        out, _ = self.prefill(x, self.init_state(x.shape[0]))
        return out

    def prefill(self, x: Array, state: KDAState, lengths: Array | None = None) -> tuple[Array, KDAState]:
        """Continues from `state` by x [B,T,D]; rows past lengths[b] change nothing in the state."""
        q, k, v, window = self._mix(x, state.window, lengths)
        g, beta = self._gates(x)
        if lengths is not None:
            real = jnp.arange(x.shape[1]) < lengths[:, None]
            g, beta = jnp.where(real[..., None, None], g, 0.0), jnp.where(real[..., None], beta, 0.0)
        out, memory = chunked(q, k, v, g, beta, state.memory)
        return self._output(x, out), KDAState(memory, window)

    def decode(self, x: Array, state: KDAState, active: Array | None = None) -> tuple[Array, KDAState]:
        """One token x [B,D]; a sequence with active[b] false keeps its state."""
        lengths = None if active is None else active.astype(jnp.int32)
        q, k, v, window = self._mix(x[:, None], state.window, lengths)
        g, beta = self._gates(x)
        out, memory = recur(q[:, 0], k[:, 0], v[:, 0], g, beta, state.memory)
        if active is not None:
            memory = jnp.where(active[:, None, None, None], memory, state.memory)
        return self._output(x, out), KDAState(memory, window)

    def _mix(self, x: Array, window: Array, lengths: Array | None) -> tuple[Array, Array, Array, Array]:
        """q, k (unit length, q scaled), v as float32 [B,T,H,K], and the next convolution window."""
        projections = [self.q_proj[...], self.k_proj[...], self.v_proj[...]]
        inputs = jnp.stack([jnp.einsum("btd,dhk->bthk", x, w) for w in projections], axis=2)
        taps = jnp.stack([self.q_conv1d[...], self.k_conv1d[...], self.v_conv1d[...]], axis=1)
        padded = jnp.concatenate([window.astype(inputs.dtype), inputs], axis=1)
        mixed = jax.nn.silu(_convolve(padded, taps))
        q, k, v = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]
        scale = q.shape[-1] ** -0.5
        return _unit(q) * scale, _unit(k), v, _tail(padded, window.shape[1], lengths)

    def _gates(self, x: Array) -> tuple[Array, Array]:
        """g = -exp(A_log) softplus(f(x) + dt_bias) [...,H,K] and beta = sigmoid(b x) [...,H], float32."""
        raw = jnp.einsum("...k,khj->...hj", x @ self.f_a_proj[...], self.f_b_proj[...]).astype(jnp.float32)
        g = -jnp.exp(self.A_log[...])[:, None] * jax.nn.softplus(raw + self.dt_bias[...])
        return g, jax.nn.sigmoid((x @ self.b_proj[...]).astype(jnp.float32))

    def _output(self, x: Array, out: Array) -> Array:
        """o_proj(rms(o) * sigmoid(g(x)))."""
        gate = jnp.einsum("...k,khj->...hj", x @ self.g_a_proj[...], self.g_b_proj[...])
        out = rms(out, self.o_norm[...], self.eps) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return jnp.einsum("...hk,hkd->...d", out.astype(x.dtype), self.o_proj[...])


def _convolve(padded: Array, taps: Array) -> Array:
    """Causal depthwise convolution; the last tap multiplies the current token. [B,W-1+T,3,H,K] -> [B,T,3,H,K]."""
    width = taps.shape[0]
    length = padded.shape[1] - width + 1
    padded, taps = padded.astype(jnp.float32), taps.astype(jnp.float32)
    return sum(padded[:, i : i + length] * taps[i] for i in range(width))


def _tail(padded: Array, width: int, lengths: Array | None) -> Array:
    """The last `width` inputs of every sequence, counted from its own length."""
    if lengths is None:
        return padded[:, padded.shape[1] - width :]
    where = lengths[:, None] + jnp.arange(width)
    return jnp.take_along_axis(padded, where[:, :, None, None, None], axis=1)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _initial_dt_bias(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    """softplus^-1 of a step size drawn log-uniformly from [1e-3, 0.1]."""
    low, high = jnp.log(1e-3), jnp.log(0.1)
    step = jnp.exp(jax.random.uniform(rngs.params(), shape, minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))
