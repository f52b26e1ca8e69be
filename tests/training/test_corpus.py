"""Corpora: broken lines are named and counted, held-out prompts refused, batches alike in length and seeded."""

import json

import numpy as np
import pytest

from edge0.errors import ErrorKind
from edge0.serving.vocabulary import Vocabulary
from edge0.training.apart import Questions
from edge0.training.corpus import Batch, Corpus, answered, epochs, read_corpus, read_prompts, write_corpus


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


def texts(*lines):
    return [{"text": line} for line in lines]


KEPT = [chat("copy  abcd", "abcd"), chat("12+34=", "46"), chat("yes", "no"), {"text": "All of\na text."}]


@pytest.mark.parametrize(
    "line",
    [
        *(
            chat(asked, "other")
            for asked in (" copy abcd\n", "Copy ABCD", "Please answer: copy abcd", "12+34=\nThanks.")
        ),
        {"messages": [{"role": "system", "content": "Be brief."}, *chat("copy abcd", "x")["messages"]]},
        {"messages": [*chat("Hello there", "Hello.")["messages"], *chat("copy abcd", "x")["messages"]]},
        *texts("copy abcd abcd", "first: copy\tabcd", "He asked '12 + 34=' and left.", "12+34=46"),
        *texts("yes", "all: All of a text."),
    ],
)
def test_white_space_and_company_do_not_hide_a_question(tmp_path, vocabulary, refused, line):
    held = read_corpus(written(tmp_path, *KEPT), vocabulary, 100)
    (tmp_path / "other").mkdir()
    corpus = read_corpus(written(tmp_path / "other", line, *texts("something else")), vocabulary, 100)
    refused(ErrorKind.CORPUS_INVALID, lambda: corpus.check_apart(held), corpus.path, held.path, "1 of 2 samples")


def test_other_words_are_another_question(tmp_path, vocabulary):
    held = read_corpus(written(tmp_path, *KEPT), vocabulary, 100)
    (tmp_path / "other").mkdir()
    lines = [
        chat("copy abcde", "x"),
        chat("yes, but why?", "copy abcd"),
        *texts("copy abcde", "112+34=", "photocopy abcd", "oh yes!", "All of a texture."),
    ]
    read_corpus(written(tmp_path / "other", *lines), vocabulary, 100).check_apart(held)


def test_a_question_is_found_in_a_script_without_spaces():
    questions = Questions(["一加二等于几"])
    assert questions.stands_in("有人问一加二等于几吗") and not questions.stands_in("有人问一加三等于几吗")


def test_prompts_need_no_answer_and_texts_among_them_are_counted(tmp_path, vocabulary, refused):
    asked = {"messages": [{"role": "user", "content": "12+3"}]}
    path = written(tmp_path, asked, chat("12+3", "15"), {"text": "once"})
    found = read_prompts(path, vocabulary, 100)
    assert found.texts == 1 and found.samples[0] == found.samples[1]
    assert found.samples[0].prompt_length == len(found.samples[0].tokens)
    assert list(found.samples[0].messages) == asked["messages"]
    nobody = {"messages": [{"role": "assistant", "content": "15"}]}
    refused(ErrorKind.CORPUS_INVALID, lambda: read_prompts(written(tmp_path, asked, nobody), vocabulary, 9), "line 2")
    only = written(tmp_path, {"text": "once"})
    refused(ErrorKind.CORPUS_INVALID, lambda: read_prompts(only, vocabulary, 9), only, "no chat, only 1 texts")


def test_a_corpus_that_cannot_be_written_is_named(tmp_path, refused):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "corpus.jsonl"
    refused(ErrorKind.OUTPUT_UNWRITABLE, lambda: write_corpus(path, []), path)


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
