"""The policies that may still sample."""

from __future__ import annotations

from p3o_jax.experience.past import PastPolicy, PolicyRing


def test_the_ring_samples_with_the_policy_of_k_steps_ago():
    ring = PolicyRing(2, {0: PastPolicy("p0")})
    behaviours = []
    for version in range(1, 6):
        behaviours.append(ring.behaviour.weights)
        ring.push(version, PastPolicy(f"p{version}"))
    assert behaviours == ["p0", "p0", "p0", "p1", "p2"]
    assert ring.newest.weights == "p5"
    assert sorted(ring.past) == [3, 4, 5]


def test_what_a_checkpoint_holds_is_what_was_kept():
    for policy in (PastPolicy("weights"), PastPolicy("weights", "params")):
        assert PastPolicy.of_stored(policy.stored()) == policy
    assert PastPolicy("weights").stored() == {"sampler": "weights"}
