"""Corpora: broken lines are named and counted, held-out prompts refused, batches alike in length and seeded."""

import json

import numpy as np
import pytest

from edge0.errors import ErrorKind
from edge0.serving.vocabulary import Vocabulary
from edge0.training.corpus import Batch, Corpus, answered, epochs, read_corpus, write_corpus


@pytest.fixture(scope="module")
def vocabulary(checkpoints) -> Vocabulary:
    return Vocabulary(checkpoints["unit-35b"])


def chat(asked, said):
    return answered([{"role": "user", "content": asked}], said)


def written(tmp_path, *lines):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_chats_and_texts_become_tokens_that_know_where_the_answer_begins(tmp_path, vocabulary):
    path = tmp_path / "c.jsonl"
    write_corpus(path, [chat("12+3", "15"), {"text": "once"}])
    corpus = read_corpus(path, vocabulary, 100)
    first, second = corpus.samples
    end, tokenizer = vocabulary.tokenizer.eos_token_id, vocabulary.tokenizer
    template = tokenizer.apply_chat_template([{"role": "user", "content": "12+3"}], add_generation_prompt=True)
    assert list(first.tokens[: first.prompt_length]) == template and first.messages[0]["content"] == "12+3"
    assert tokenizer.decode(first.tokens[first.prompt_length : -1]) == "15" and first.tokens[-1] == end
    assert second.prompt_length == 1 and tokenizer.decode(second.tokens[:-1]) == "once"
    batch = Batch.of(corpus.samples, end)
    trained = [np.array(batch.tokens)[n, 1:][np.array(batch.answers)[n, :-1]].tolist() for n in (0, 1)]
    assert trained == [list(first.tokens[first.prompt_length :]), list(second.tokens[1:])]


BROKEN = [
    "not JSON\n",
    "[1]\n",
    {"messages": [], "text": "both"},
    {"other": 1},
    {"text": ""},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]},
    {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "y"}]},
    {"messages": "text"},
    {"text": "long" * 100},
]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named_and_skipped_only_on_demand(tmp_path, vocabulary, refused, line):
    path = written(tmp_path, chat("a", "b"), line, chat("c", "d"))
    refused(ErrorKind.CORPUS_INVALID, lambda: read_corpus(path, vocabulary, 100), path, "line 2", "--skip-broken")
    corpus = read_corpus(path, vocabulary, 100, skip_broken=True)
    assert len(corpus.samples) == 2 and corpus.skipped == 1


def test_many_broken_lines_are_counted_and_the_first_named(tmp_path, vocabulary, refused):
    path = written(tmp_path, *["x\n"] * 9, chat("a", "b"))
    refused(ErrorKind.CORPUS_INVALID, lambda: read_corpus(path, vocabulary, 100), "9 of 10 lines", "line 5", "...")


def test_absent_and_empty_corpora(tmp_path, vocabulary, refused):
    refused(ErrorKind.FILE_MISSING, lambda: read_corpus(tmp_path / "no", vocabulary, 9), tmp_path / "no")
    refused(ErrorKind.CORPUS_INVALID, lambda: read_corpus(written(tmp_path), vocabulary, 9), "empty")
    refused(ErrorKind.CORPUS_INVALID, lambda: read_corpus(written(tmp_path, "x\n"), vocabulary, 9, True), "1 of 1")
    refused(ErrorKind.FILE_UNREADABLE, lambda: read_corpus(tmp_path, vocabulary, 9), tmp_path)


def test_prompts_that_are_kept_for_evaluation_are_refused(tmp_path, vocabulary, refused):
    corpus = read_corpus(written(tmp_path, chat("a", "1"), chat("b", "2")), vocabulary, 100)
    kept = Corpus(tmp_path / "kept", corpus.samples[1:], "", 0)
    refused(ErrorKind.CORPUS_INVALID, lambda: corpus.check_apart(kept), corpus.path, tmp_path / "kept", "1 of 2")
    corpus.check_apart(Corpus(tmp_path / "kept", (), "", 0))


def test_an_epoch_has_every_sample_once_and_batches_of_like_length(tmp_path, vocabulary):
    lines = [chat("a" * (n % 17), str(n)) for n in range(64)]
    samples = read_corpus(written(tmp_path, *lines), vocabulary, 100).samples
    make = epochs(samples, batch=8, accumulate=2, seed=1, pad=0)
    seen = []
    for step in range(4):
        for part in range(2):
            batch = make(step, part)
            assert np.array(batch.tokens).tobytes() == np.array(make(step, part).tokens).tobytes()
            lengths = np.array(batch.lengths)[:, 0]
            assert np.ptp(lengths) <= 8
            seen += [tuple(row[:n]) for row, n in zip(np.array(batch.tokens).tolist(), lengths, strict=True)]
    assert sorted(seen) == sorted(sample.tokens for sample in samples)
    other = epochs(samples, batch=8, accumulate=2, seed=2, pad=0)(0, 0)
    assert other.tokens.shape != make(0, 0).tokens.shape or not (other.tokens == make(0, 0).tokens).all()
