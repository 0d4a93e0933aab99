"""Control flow that does not copy what it carries."""

import jax
import jax.numpy as jnp
from jax import lax


def when(condition: jax.Array, update, carry):
    """update(carry) if the condition (bool []) holds, else carry.

    A loop of one round or none, because XLA updates the carry of a loop in place where it copies that of a conditional:
    for a cache that would be every row, every step. The barrier ties what the update computes to the round it is in, or
    XLA moves it before the loop, as it does with all that is the same in every round, and computes it in any case.
    """

    def body(i, carry):
        _, carry = lax.optimization_barrier((i, carry))
        return update(carry)

    return lax.fori_loop(0, condition.astype(jnp.int32), body, carry)


def after(condition: jax.Array, value: jax.Array) -> jax.Array:
    """The condition (bool []), known only once the float32 `value` is.

    An update under it can write in place: all that led to `value` has been read. (XLA drops an optimization barrier
    before it decides on copies; this dependence is one of data, true for every value.)
    """
    always = jnp.maximum(lax.bitcast_convert_type(value.ravel()[0], jnp.int32), 1) > 0
    return condition & always
