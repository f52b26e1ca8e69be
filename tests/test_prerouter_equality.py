"""Decoding token by token with predictions equals one forward over the whole sequence, predictions shifted by one."""

import numpy as np
import pytest
from reference import PROMPT, TOKENS, executed_sets, same_bits, sequence_run

from edge0 import Engine, EngineOptions

STEPS = TOKENS[:12]


@pytest.mark.parametrize(
    ("k", "feature", "lora", "prompt"),
    [
        (2, "executed", False, PROMPT),
        (8, "executed", True, PROMPT),
        (4, "teacher", False, PROMPT),
        (8, "teacher", True, PROMPT[:2]),
        (8, "executed", False, PROMPT[:1]),
    ],
)
def test_decode_equals_the_shifted_sequence(tier, checkpoint, k, feature, lora, prompt):
    rows, sets = [], []
    with Engine(checkpoint, EngineOptions(k=k, feature=feature, lora=lora)) as engine:
        request = engine.new_request()
        rows.append(np.array(engine.prefill(request, prompt)))
        for token in STEPS:
            rows.append(np.array(engine.step(request, token)))
            sets.append(executed_sets(engine))
        request.release()
        predicted = engine.schedule.predicted
    expected, executor = sequence_run(checkpoint, k, prompt, STEPS, lora=lora, teacher=feature == "teacher")

    assert list(predicted) == executor.predicted
    for number, chosen in enumerate(sets):
        position = len(prompt) + number
        for layer, route in executor.executed.items():
            assert chosen[layer] == frozenset(np.array(route[0, position]).tolist()), (layer, position)
    if tier.family.tag == "35b":
        assert same_bits(np.stack(rows), expected)
    else:  # its attention has another form for one token than for many
        np.testing.assert_allclose(np.stack(rows), expected, rtol=0, atol=1e-5)


def test_first_decode_step_is_routed_natively_on_35b_and_by_prediction_on_8b(tier, checkpoint):
    with Engine(checkpoint, EngineOptions(k=4)) as engine:
        request = engine.new_request()
        engine.prefill(request, PROMPT)
        before_first = set(request.predictions)
        engine.step(request, STEPS[0])
        after_first = set(request.predictions)
        request.release()
        predicted = set(engine.schedule.predicted)
    assert before_first == (set() if tier.family.tag == "35b" else predicted)
    assert after_first == predicted


def test_features_matter(checkpoints):
    """The teacher's one-hots give other routes than the executed ones, or the equality above would not tell."""
    logits = []
    for feature in ("executed", "teacher"):
        with Engine(checkpoints["unit-8b"], EngineOptions(k=8, feature=feature)) as engine:
            request = engine.new_request()
            engine.prefill(request, PROMPT)
            logits.append(np.stack([np.array(engine.step(request, token)) for token in STEPS]))
            request.release()
    assert not same_bits(*logits)
