"""One answer: what it says, what ends it, what it cost, and that it leaves nothing behind."""

from dataclasses import replace

import pytest
from reference import PROMPT

from edge0 import Engine, EngineOptions, Sampling
from edge0.errors import ErrorKind
from edge0.serving.completion import Cancelled, Finished, Order, complete
from edge0.serving.vocabulary import Vocabulary

TIER_NAMES = ("unit-35b", "unit-8b")

GREEDY = Sampling()


@pytest.fixture(scope="module", params=TIER_NAMES)
def shared(request, checkpoints):
    """An engine and the vocabulary of its checkpoint, where nothing ends an answer by chance."""
    checkpoint = checkpoints[request.param]
    with Engine(checkpoint, EngineOptions(k=2, bank_bytes=1 << 30, prefill_chunk=4)) as engine:
        vocabulary = Vocabulary(checkpoint)
        vocabulary.ends = frozenset()
        yield engine, vocabulary


@pytest.fixture
def opened(shared):
    yield shared
    engine, _ = shared
    assert sum(engine.store._pins) == 0 and engine.recorder.dropped == 0


def answer(opened, order, **extra):
    *pieces, finished = complete(*opened, order, **extra)
    assert isinstance(finished, Finished) and all(pieces)
    return "".join(pieces), finished


def text_of(vocabulary, tokens):
    return vocabulary.tokenizer.decode(tokens, skip_special_tokens=True)


def test_greedy_text_is_that_of_generate_and_equal_orders_are_equal(opened):
    engine, vocabulary = opened
    tokens = list(engine.generate(PROMPT, 14))
    text, finished = answer(opened, Order(tuple(PROMPT), 14, GREEDY))
    assert text == text_of(vocabulary, tokens)
    assert (finished.reason, finished.prompt_tokens, finished.completion_tokens) == ("length", len(PROMPT), 14)
    assert answer(opened, Order(tuple(PROMPT), 14, GREEDY))[0] == text


def test_the_seed_decides(opened):
    orders = [Order(tuple(PROMPT), 10, Sampling(1.0, seed=seed)) for seed in (5, 5, 6)]
    first, again, other = [answer(opened, order)[0] for order in orders]
    assert first == again != other


def test_an_end_token_ends_the_answer_and_is_not_shown(opened, monkeypatch):
    engine, vocabulary = opened
    tokens = list(engine.generate(PROMPT, 14))
    monkeypatch.setattr(vocabulary, "ends", frozenset({tokens[9]}))
    before = tokens[: tokens.index(tokens[9])]
    text, finished = answer(opened, Order(tuple(PROMPT), 14, GREEDY))
    assert text == text_of(vocabulary, before)
    assert (finished.reason, finished.completion_tokens) == ("stop", len(before) + 1)


def test_a_stop_string_ends_the_answer_before_it(opened):
    engine, vocabulary = opened
    whole = text_of(vocabulary, list(engine.generate(PROMPT, 16)))
    stop = whole[3:6]
    text, finished = answer(opened, Order(tuple(PROMPT), 16, GREEDY, (stop, "never")))
    assert text == whole[: whole.index(stop)] and finished.reason == "stop" and finished.completion_tokens < 16


def test_the_context_ends_the_answer(opened, monkeypatch):
    engine, _ = opened
    monkeypatch.setattr(engine, "context_tokens", len(PROMPT) + 5)
    for wanted in (None, 100):
        _, finished = answer(opened, Order(tuple(PROMPT), wanted, GREEDY))
        assert (finished.reason, finished.completion_tokens) == ("length", 5)


def test_costs_add_up_to_the_engines_totals(opened):
    engine, _ = opened
    before, (_, finished) = replace(engine.recorder.totals), answer(opened, Order(tuple(PROMPT), 8, GREEDY))
    after, phases = engine.recorder.totals, (finished.prefill, finished.decode)
    assert after.asked_bytes - before.asked_bytes == sum(phase.asked_bytes for phase in phases)
    assert after.loads - before.loads == sum(phase.loads for phase in phases)
    assert after.hits - before.hits == sum(phase.hits for phase in phases) > 0
    assert (finished.prefill.tokens, finished.decode.tokens) == (len(PROMPT), 7)
    assert all(phase.tokens_per_second > 0 for phase in phases)
    again = answer(opened, Order(tuple(PROMPT), 1, GREEDY))[1]
    assert (again.decode.tokens, again.decode.loads, again.prefill.hits > 0) == (0, 0, True)


@pytest.mark.parametrize("questions", [0, 1, 2, 5, 9])
def test_a_cancelled_answer_ends_at_its_next_chunk_or_token(opened, questions):
    """The prompt has several chunks, so early questions are asked while it is read."""
    engine, _ = opened
    asked = []

    def cancelled():
        asked.append(True)
        return len(asked) > questions

    with pytest.raises(Cancelled):
        list(complete(*opened, Order(tuple(PROMPT), 40, GREEDY), cancelled))
    assert len(asked) == questions + 1
    assert sum(engine.store._pins) == 0
    assert answer(opened, Order(tuple(PROMPT), 6, GREEDY))[1].completion_tokens == 6


def test_an_answer_that_is_dropped_half_way_holds_nothing(opened):
    engine, _ = opened
    events = complete(*opened, Order(tuple(PROMPT), 40, GREEDY))
    next(events)
    events.close()
    assert sum(engine.store._pins) == 0


def test_a_prompt_that_the_engine_refuses(opened, refused):
    refused(ErrorKind.PROMPT_INVALID, lambda: list(complete(*opened, Order((10**6,), 3, GREEDY))), 10**6)
