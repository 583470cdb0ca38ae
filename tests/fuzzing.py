"""Requests drawn by hypothesis: valid bodies with some fields replaced, removed or added, and broken JSON."""

import json

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([2**63, -1, 0, "a" * 9000, "\0", "\ud800", "{question}", "64x0", "9999x64"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def bodies(count, valid, fields):
    """Bodies of requests.

    Args:
        count: Number of bodies.
        valid: Strategy of valid bodies.
        fields: Fields that are replaced or added.
    """
    changes = st.dictionaries(st.sampled_from(fields) | st.text(max_size=8), VALUES, max_size=2)
    plain = valid.map(lambda body: json.dumps(body).encode())
    whole = st.builds(lambda body, more: json.dumps(body | more).encode(), valid, changes)
    cut = st.builds(lambda body, share: body[: int(share * len(body))], whole, st.floats(0, 1))
    found = []

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(st.one_of(plain, whole, whole, cut, st.binary(max_size=100)))
    def draw(body):  # the threads of a service in this process would disturb hypothesis while it draws
        found.append(body)

    draw()
    return found[:count]


def check(answer, *others):
    """Check that a response is an answer, or one clear refusal."""
    assert answer.status_code in (200, 400, *others), answer.text
    if answer.status_code != 200:
        assert 5 < len(answer.json()["error"]["message"]) < 500
