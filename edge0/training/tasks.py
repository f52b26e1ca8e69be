"""Seeded problems that a tiny model can learn: arithmetic, copying, and the formats of the five quality benchmarks.

A problem is a prompt and the one answer that counts; answers have several tokens on purpose, because the first one is
routed natively wherever a prompt ends. One prompt in ten is held out, by its hash: training never draws one, whatever
its seed, and evaluation draws nothing else. `PHRASES` are what the prompts of the benchmarks say around the question;
the tiny tiers' tokenizer has one token for each, so that a sequence stays short.

Knows nothing of models or of scoring; the benchmarks' files are laid out in `experiments.quality`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

HELD_OUT_SHARE = 0.1
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OPTIONS = "ABCDEFGHIJ"
THINK = "Think step by step before answering.\n\n"
CHOOSE = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'ANSWER: $LETTER' (without quotes) where LETTER is one of "
)
GPQA, MMLU_PRO = f"{CHOOSE}ABCD. {THINK}", f"{CHOOSE}Options(e.g. one of ABCDEFGHIJKLMNOP). {THINK}Question:\n\n"
MMLU_PRO_OPTIONS = "\n\nOptions:\n\n"
BOXED = "\nRemember to put your final answer within \\boxed{}."
IMPLEMENT = (
    "Read the following function signature and docstring, and fully implement the function described. Your response "
    "should only contain the code for this function.\n"
)
SIGNATURE, DOCSTRING_END = 'def f(x):\n    """Return x', '."""\n'
CODE, CODE_END = "```python\ndef f(x):\n    return ", "\n```"
CHAIN = "Work from left to right and keep only the last digit of each result: "
COUNT, COUNT_END = "Include exactly ", " numbers in the response."
SPAN, SPAN_END = (
    "\nCopy the span of words that lies between (and including) index ",
    ", the indices are character indices!",
)
NEWLINE, NO_SPACE = "Write each word on a new line.", "The output should not contain any whitespace."
PHRASES = (
    *(GPQA, MMLU_PRO, MMLU_PRO_OPTIONS, BOXED, IMPLEMENT, SIGNATURE, DOCSTRING_END, CODE, CODE_END, CHAIN),
    *(COUNT, COUNT_END, SPAN, SPAN_END, NEWLINE, NO_SPACE, "\\boxed{", "\nANSWER: ", " and ", ". "),
    *(" plus ", " minus ", " times ", "Count up from ", "Repeat: ", "What is "),
    *("copy ", "reverse "),
    *(f"\n{letter}) " for letter in "BCD"),
    *(f"\n{letter}. " for letter in OPTIONS[1:]),
    *(f"{lead}{letter}{tail}" for lead, letter, tail in (("\n\n", "A", ") "), ("", "A", ". "))),
)


@dataclass(frozen=True)
class Problem:
    """`answer` is all that is to be said, without the end of text; `about` is what a benchmark's file needs besides."""

    task: str
    prompt: str
    answer: str
    about: tuple[tuple[str, object], ...] = ()


def addition(rng: np.random.Generator) -> Problem:
    """`12+34=` to `640>046`: the digits from the last to the first, then the sum."""
    left, right = rng.integers(0, 100, 2).tolist()
    text = f"{left + right:03}"
    return Problem("addition", f"{left:02}+{right:02}=", f"{text[::-1]}>{text}")


def copying(rng: np.random.Generator) -> Problem:
    word = _word(rng)
    return Problem("copy", f"copy {word}", word)


def reversing(rng: np.random.Generator) -> Problem:
    word = _word(rng)
    return Problem("reverse", f"reverse {word}", word[::-1])


def modulo(rng: np.random.Generator) -> Problem:
    """`37%7=` to `5,2`: quotient and remainder."""
    divisor = int(rng.integers(2, 10))
    number = int(rng.integers(0, 10 * divisor))
    return Problem("modulo", f"{number:02}%{divisor}=", f"{number // divisor},{number % divisor}")


def chain(rng: np.random.Generator) -> Problem:
    """Long reasoning, in AIME's format: every step is written out, the last digit is what is asked for."""
    digits = rng.integers(0, 10, rng.integers(4, 8)).tolist()
    value, question, steps = digits[0], str(digits[0]), []
    for digit in digits[1:]:
        plus = bool(rng.integers(0, 2))
        question += f"{'+' if plus else '*'}{digit}"
        value = (value + digit if plus else value * digit) % 10
        steps.append(str(value))
    return Problem("chain", f"{CHAIN}{question}{BOXED}", f"{''.join(steps)}\\boxed{{{value}}}")


def choice_of_four(rng: np.random.Generator) -> Problem:
    """A sum and four options, as GPQA has them."""
    left, right = rng.integers(0, 20, 2).tolist()
    options, letter = _options(rng, left + right, 4, 39)
    question = f"{left}+{right}?"
    listed = f"\n\nA) {options[0]}" + "".join(f"\n{OPTIONS[n]}) {options[n]}" for n in range(1, 4))
    about = (("question", question), ("options", tuple(options)), ("right", OPTIONS.index(letter)))
    return Problem("choice-of-4", f"{GPQA}{question}{listed}", f"{left + right}\nANSWER: {letter}", about)


def choice_of_ten(rng: np.random.Generator) -> Problem:
    """A product of two digits and ten options, as MMLU-Pro has them."""
    left, right = rng.integers(0, 10, 2).tolist()
    options, letter = _options(rng, left * right, 10, 82)
    question = f"{left}*{right}?"
    listed = f"A. {options[0]}" + "".join(f"\n{OPTIONS[n]}. {options[n]}" for n in range(1, 10))
    about = (("question", question), ("options", tuple(options)), ("right", OPTIONS.index(letter)))
    prompt = f"{MMLU_PRO}{question}{MMLU_PRO_OPTIONS}{listed}"
    return Problem("choice-of-10", prompt, f"{left * right}\nANSWER: {letter}", about)


def function(rng: np.random.Generator) -> Problem:
    """A function of one line, as HumanEval asks for it."""
    words = {"plus": "+", "minus": "-", "times": "*"}
    first, second = (list(words)[n] for n in rng.integers(0, 3, 2))
    left, right = rng.integers(1, 100), rng.integers(1, 10)
    signature = f"{SIGNATURE} {first} {left} and {second} {right}{DOCSTRING_END}"
    body = f"(x{words[first]}{left}){words[second]}{right}"
    return Problem("function", f"{IMPLEMENT}{signature}", f"{CODE}{body}{CODE_END}", (("signature", signature),))


def instruction(rng: np.random.Generator) -> Problem:
    """One of four of IFBench's own instructions, about a few digits or letters."""
    kind = int(rng.integers(0, 4))
    letters = [LETTERS[n] for n in rng.permutation(26)[: rng.integers(4, 7)]]
    if kind == 0:
        start, count = int(rng.integers(0, 30)), int(rng.integers(3, 7))
        prompt = f"Count up from {start}. {COUNT}{count}{COUNT_END}"
        answer, told = " ".join(str(start + n) for n in range(count)), {"N": count}
    elif kind == 1:
        start = int(rng.integers(1, len(letters) - 1))
        end = int(rng.integers(start + 2, len(letters) + 1))
        sentence = " ".join(letters)
        prompt = f"{sentence}{SPAN}{start} and {end}{SPAN_END}"
        answer = " ".join(letters[start:end])
        told = {"prompt_to_repeat": sentence, "n_start": start, "n_end": end}
    elif kind == 2:
        prompt, answer, told = f"Repeat: {' '.join(letters)}. {NEWLINE}", "\n".join(letters), {}
    else:
        prompt, answer, told = f"Repeat: {' '.join(letters)}. {NO_SPACE}", "".join(letters), {}
    name = ("count:numbers", "repeat:repeat_span", "format:newline", "format:no_whitespace")[kind]
    return Problem("instruction", prompt, answer, (("instruction", name), ("arguments", tuple(told.items()))))


TASKS: Mapping[str, Callable[[np.random.Generator], Problem]] = {
    "addition": addition,
    "copy": copying,
    "reverse": reversing,
    "modulo": modulo,
    "chain": chain,
    "choice-of-4": choice_of_four,
    "choice-of-10": choice_of_ten,
    "function": function,
    "instruction": instruction,
}


def held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training: a property of its text alone, of no seed and no task."""
    return hashlib.sha256(prompt.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def problems(task: str, seed: int, held: bool) -> Iterator[Problem]:
    """Endless problems of a task, all held out or none."""
    rng = np.random.default_rng([seed, sorted(TASKS).index(task), int(held)])
    while True:
        problem = TASKS[task](rng)
        if held_out(problem.prompt) == held:
            yield problem


def _word(rng: np.random.Generator) -> str:
    return "".join(LETTERS[n] for n in rng.integers(0, 26, rng.integers(4, 8)))


def _options(rng: np.random.Generator, right: int, count: int, below: int) -> tuple[list[int], str]:
    """Distinct numbers, the right one among them, and its letter."""
    others = rng.permutation([n for n in range(below) if n != right])[: count - 1].tolist()
    place = int(rng.integers(0, count))
    return [*others[:place], right, *others[place:]], OPTIONS[place]
