"""Training's forward is the engine's decode: same routes, same logits, with heads, LoRA and predictions."""

import mlx.core as mx
import numpy as np
import pytest
from reference import PROMPT, TOKENS, dequantised_logits, executed_sets

from edge0 import Engine, EngineOptions
from edge0.training.adapters import load_adapter
from edge0.training.sampling import answers
from edge0.training.student import Student

STEPS = TOKENS[:12]
CLOSE = {"rtol": 0, "atol": 2e-4}  # an fp32 product with a dequantised matrix is another sum than the quantised one


def adapters(checkpoint, k):
    (heads, owners), (lora, _) = (load_adapter(checkpoint, kind, k) for kind in ("prerouter", "lora"))
    return heads, owners, lora


def engine_rows(checkpoint, k, **options):
    rows, sets = [], []
    with Engine(checkpoint, EngineOptions(k=k, **options)) as engine:
        request = engine.new_request()
        rows.append(np.array(engine.prefill(request, PROMPT)))
        for token in STEPS:
            rows.append(np.array(engine.step(request, token)))
            sets.append(executed_sets(engine))
        request.release()
    return np.stack(rows), sets


def lengths(count):
    return mx.array([[count]])


@pytest.mark.parametrize("feature", ["executed", "teacher"])
def test_a_forward_is_the_engines_decode(checkpoint, feature):
    heads, owners, lora = adapters(checkpoint, 8)
    expected, sets = engine_rows(checkpoint, 8, feature=feature)
    student = Student(checkpoint, 8, owners, feature)
    student.use_lora()
    logits = student.forward(mx.array([[*PROMPT, *STEPS]]), lengths(len(PROMPT)), heads, lora)
    np.testing.assert_allclose(np.array(logits[0, len(PROMPT) - 1 :]), expected, **CLOSE)
    for number, chosen in enumerate(sets):
        for layer, seen in student.executor.seen.items():
            route = np.array(seen.indices[0, len(PROMPT) + number]).tolist()
            assert frozenset(route) == chosen[layer], (layer, number)


def test_without_adapters_it_is_the_dequantised_model(checkpoint):
    logits = Student(checkpoint, 4).forward(mx.array([[*PROMPT, *STEPS]]), lengths(len(PROMPT)))
    expected = dequantised_logits(checkpoint, 4, tokens=STEPS)
    np.testing.assert_allclose(np.array(logits[0, len(PROMPT) - 1 :]), expected, **CLOSE)


def test_padding_and_company_change_nothing(checkpoint):
    heads, owners, _ = adapters(checkpoint, 4)
    student = Student(checkpoint, 4, owners)
    long, short = [*PROMPT, *STEPS], [*PROMPT[:5], *STEPS[:6]]
    alone = [np.array(student.forward(mx.array([row]), lengths(n), heads)[0]) for row, n in ((long, 20), (short, 5))]
    tokens = mx.array([long, [*short, *[0] * (len(long) - len(short))]])
    both = np.array(student.forward(tokens, mx.array([[20], [5]]), heads))
    for row, expected in zip(both, alone, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, **CLOSE)


@pytest.mark.parametrize("k", [2, 8])
def test_answers_are_those_of_the_engine(checkpoint, k):
    heads, owners, lora = adapters(checkpoint, k)
    student = Student(checkpoint, k, owners)
    student.use_lora()
    prompts = [PROMPT, PROMPT[3:], PROMPT[::-1]]
    found = answers(student, prompts, heads, lora, 5, end=-1)
    with Engine(checkpoint, EngineOptions(k=k)) as engine:
        for prompt, row in zip(prompts, found, strict=True):
            request = engine.new_request()
            logits, said = engine.prefill(request, prompt), []
            for _ in range(5):
                said.append(int(mx.argmax(logits).item()))
                logits = engine.step(request, said[-1])
            request.release()
            assert said == row


def test_gradients_are_the_same_when_layers_are_computed_again(checkpoint):
    heads, owners, lora = adapters(checkpoint, 4)
    student = Student(checkpoint, 4, owners)
    student.use_lora()
    student.model.train()
    tokens, prompt = mx.array([[*PROMPT, *STEPS]]), lengths(len(PROMPT))

    def loss(lora, again):
        return student.forward(tokens, prompt, heads, lora, checkpointing=again).astype(mx.float32).square().mean()

    (plain, first), (recomputed, second) = (mx.value_and_grad(loss)(lora, again) for again in (False, True))
    assert float(plain) == pytest.approx(float(recomputed), rel=1e-6)
    for name in lora:
        np.testing.assert_allclose(np.array(first[name]), np.array(second[name]), rtol=1e-3, atol=1e-6)
    assert all(float(mx.abs(grad).max()) > 0 for name, grad in first.items() if name.endswith("lora_B"))


def test_a_bound_correction_is_not_forgotten(checkpoint):
    student = Student(checkpoint, 4)
    student.use_lora()
    with pytest.raises(ValueError, match="give its tensors"):
        student.forward(mx.array([PROMPT]), lengths(len(PROMPT)))


def test_advice_is_looked_at_and_not_followed(checkpoint):
    heads, owners, _ = adapters(checkpoint, 4)
    tokens, prompt, whole = mx.array([[*PROMPT, *STEPS]]), lengths(len(PROMPT)), lengths(len(PROMPT) + len(STEPS))
    alone = np.array(Student(checkpoint, 4).forward(tokens, prompt))
    advised, following = Student(checkpoint, 4, owners, advisory=True), Student(checkpoint, 4, owners)
    assert np.array(advised.forward(tokens, prompt, heads)).tobytes() == alone.tobytes()
    assert np.array(following.forward(tokens, prompt, heads)).tobytes() != alone.tobytes()
    recalls = [float(share) for share in advised.recall(prompt, whole).values()]
    assert len(recalls) == len(following.executor.predicted) and all(0 < share < 1 for share in recalls)
