"""Problems: right answers, held-out prompts apart from those that train, short sequences."""

import re

import pytest

from edge0.serving.vocabulary import Vocabulary
from edge0.training import teacher
from edge0.training.tasks import CHAIN, OPTIONS, TASKS, held_out, problems


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
    return teacher.vocabulary_in(tmp_path_factory.mktemp("tokenizer"))


def some(task, held=False, count=200, seed=0):
    source = problems(task, seed, held)
    return [next(source) for _ in range(count)]


def solve(problem):
    """The answer, found another way than the task made it."""
    prompt, task = problem.prompt, problem.task
    numbers = [int(n) for n in re.findall(r"\d+", prompt)]
    about = dict(problem.about)
    if task == "addition":
        total = f"{numbers[0] + numbers[1]:03}"
        return f"{total[::-1]}>{total}"
    if task in ("copy", "reverse"):
        return prompt.split()[1][:: 1 if task == "copy" else -1]
    if task == "modulo":
        return "{},{}".format(*divmod(*numbers))
    if task == "chain":
        expression = prompt.removeprefix(CHAIN).split("\n")[0]
        value, said = int(expression[0]), ""
        for sign, digit in re.findall(r"([+*])(\d)", expression):
            value = eval(f"{value}{sign}{digit}") % 10
            said += str(value)
        return f"{said}\\boxed{{{value}}}"
    if task.startswith("choice"):
        value = eval(about["question"].rstrip("?"))
        listed = dict(re.findall(r"([A-J])[.)] (\d+)", prompt.partition(about["question"])[2]))
        letter = next(letter for letter, option in listed.items() if int(option) == value)
        assert len(set(listed.values())) == len(listed) and OPTIONS[about["right"]] == letter
        return f"{value}\nANSWER: {letter}"
    if task == "function":
        scope = {}
        exec(re.search(r"```python\n(.*)\n```", problem.answer, re.S)[1], scope)
        words = re.search(r"x (\w+) (\d+) and (\w+) (\d+)", prompt).groups()
        for x in (0, 3, -7):
            value = x
            for word, number in (words[:2], words[2:]):
                value = {"plus": value + int(number), "minus": value - int(number), "times": value * int(number)}[word]
            assert scope["f"](x) == value
        return problem.answer
    told = dict(about["arguments"])
    if about["instruction"] == "count:numbers":
        assert numbers[1] == told["N"]
        return " ".join(str(numbers[0] + n) for n in range(told["N"]))
    if about["instruction"] == "repeat:repeat_span":
        return " ".join(prompt.split("\n")[0].split()[told["n_start"] : told["n_end"]])
    letters = prompt.removeprefix("Repeat: ").split(".")[0].split()
    return ("\n" if about["instruction"] == "format:newline" else "").join(letters)


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right(task):
    for problem in some(task):
        assert problem.answer == solve(problem) and problem.task == task


@pytest.mark.parametrize("task", TASKS)
def test_held_out_prompts_never_train_whatever_the_seed(task):
    train = {problem.prompt for seed in range(3) for problem in some(task, seed=seed)}
    held = {problem.prompt for problem in some(task, held=True, count=60)}
    assert not train & held and not any(map(held_out, train)) and all(map(held_out, held))
    assert some(task, seed=5, count=20) == some(task, seed=5, count=20) != some(task, seed=6, count=20)


@pytest.mark.parametrize("task", TASKS)
def test_sequences_are_short_and_the_tokenizer_gives_back_what_it_was_given(task, vocabulary):
    tokenizer = vocabulary.tokenizer
    for problem in some(task, count=60):
        sample = teacher.sample_of(problem, vocabulary)
        asked, said = sample.tokens[: sample.prompt_length], sample.tokens[sample.prompt_length :]
        assert said[-1] == tokenizer.eos_token_id and tokenizer.decode(list(said[:-1])) == problem.answer
        assert tokenizer.decode(list(asked)) == f"{problem.prompt}<|im_start|>"
        assert b"".join(map(vocabulary.token_bytes, said)).decode() == problem.answer
        assert len(sample.tokens) <= (48 if task == "choice-of-10" else 32) and len(said) >= 4


def test_a_batch_of_training_holds_no_held_out_prompt_and_is_a_function_of_its_number(vocabulary):
    make = teacher.drawn(vocabulary, 16, seed=3)
    first, again, other = make(5, 0), make(5, 0), make(6, 0)
    assert (first.tokens == again.tokens).all() and first.tokens.shape[0] == 16
    assert first.tokens.shape != other.tokens.shape or not (first.tokens == other.tokens).all()
