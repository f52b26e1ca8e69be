"""The journal: a killed run goes on with the questions that are missing."""

from experiments.quality.arms import Answer
from experiments.quality.journal import Entry, Journal
from experiments.quality.messages import messages_of

ASKED = [{"role": "user", "content": "1+1?"}]
ENTRY = Entry(Answer('"2"\n\u2028', 5, 2, "end"), 0.25)


def test_what_was_answered_is_found_again(tmp_path):
    journal = Journal(tmp_path / "answers.jsonl")
    assert journal.find(ASKED, 64) is None
    journal.add(ASKED, 64, ENTRY)
    again = Journal(journal.path)
    assert again.find(ASKED, 64) == ENTRY
    assert (len(again), again.broken) == (1, 0)


def test_another_limit_or_message_is_another_question(tmp_path):
    journal = Journal(tmp_path / "answers.jsonl")
    journal.add(ASKED, 64, ENTRY)
    assert journal.find(ASKED, 65) is None
    assert journal.find([{"role": "system", "content": "1+1?"}], 64) is None


def test_a_torn_line_is_asked_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    Journal(path).add(ASKED, 64, ENTRY)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "a"}\n' + whole.replace(b'"end"', b"3") + whole[: len(whole) // 2] + b"\xff")
    journal = Journal(path)
    assert (len(journal), journal.broken) == (1, 3)
    assert path.read_bytes() == whole
    journal.add(ASKED, 7, ENTRY)
    assert Journal(path).broken == 0


def test_opencompass_prompts_are_messages():
    items = [{"role": "SYSTEM", "prompt": "s"}, {"role": "HUMAN", "prompt": "h"}, {"role": "user", "content": "u"}]
    assert messages_of(items) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "user", "content": "u"},
    ]
    assert messages_of("h") == [{"role": "user", "content": "h"}]
