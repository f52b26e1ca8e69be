"""`edge0 chat` and `edge0 serve` as they are typed."""

import io
import re
import signal

import pytest

from edge0.cli import main
from edge0.commands import chat as chat_command
from edge0.errors import EXIT_CODE
from edge0.serving import completion
from edge0.serving.completion import complete

COST = re.compile(
    r"prefill \d+ tokens in \d+\.\d\d s \(\d+\.\d tok/s\), \d+ expert loads .*\d+% of experts found in memory; "
    r"decode \d+ tokens, \d+\.\d tok/s, \d+ expert loads .*\d+% of experts found in memory"
)


@pytest.fixture
def chat(checkpoints, monkeypatch, capsys):
    """A function that pipes lines into `edge0 chat`; returns its output, remarks, and the prompts that were read."""
    prompts = []

    def spy(engine, vocabulary, order, cancelled):
        prompts.append(vocabulary.tokenizer.decode(order.prompt))
        yield from complete(engine, vocabulary, order, cancelled)

    def run(lines, *arguments):
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO(b"".join(line + b"\n" for line in lines)), "utf-8")
        )
        monkeypatch.setattr(completion, "complete", spy)
        command = ["chat", str(checkpoints["unit-35b"]), "--k", "2", "--max-tokens", "6", *arguments]
        assert main(command) == 0
        said = capsys.readouterr()
        return said.out, said.err, prompts

    return run


def test_a_conversation_is_kept_reset_and_left(chat):
    out, err, prompts = chat([b"one", b"two", b"", b"/reset", b"three", b"/exit", b"four"], "--system", "be brief")
    assert len(prompts) == 3 and len(re.findall(COST, err)) == 3
    first = out.split("\n")[0]
    start = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
    turn = "<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0] == f"{start}one{turn}" and prompts[2] == f"{start}three{turn}"
    assert prompts[1].startswith(f"{start}one{turn}") and prompts[1].endswith(f"<|im_start|>user\ntwo{turn}")
    assert first and len(prompts[1]) > len(prompts[0]) + len(turn)


def test_a_turn_that_fails_is_taken_back_and_the_conversation_goes_on(chat):
    out, err, prompts = chat([b"x" * 5000, b"sh\xffrt"])
    assert "edge0: " in err and "context" in err and len(re.findall(COST, err)) == 1
    assert prompts[1] == "<|im_start|>user\nsh\ufffdrt<|im_end|>\n<|im_start|>assistant\n"


def test_ctrl_c_ends_the_answer_and_not_the_program(chat, monkeypatch):
    real = chat_command.Interrupt.__enter__

    def enter(self):
        entered = real(self)
        if not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)
        return entered

    interrupted = []
    monkeypatch.setattr(chat_command.Interrupt, "__enter__", enter)
    before = signal.getsignal(signal.SIGINT)
    out, err, prompts = chat([b"one", b"two"])
    assert "interrupted" in err and len(re.findall(COST, err)) == 1 and len(prompts) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_insists():
    with pytest.raises(KeyboardInterrupt), chat_command.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.seen
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", "example.org"], "--api-key-file"),
        (["--queue", "0"], "queue"),
        (["--max-tokens-limit", "0"], "max-tokens-limit"),
        (["--request-seconds", "nan"], "request-seconds"),
        (["--max-body", "lots"], "max-body"),
        (["--max-body", "9" * 400], "max-body"),
        (["--port", "99999"], "listen"),
        (["--k", "999"], "999"),
        (["--api-key-file", "{empty}"], "api-key-file"),
        (["--api-key-file", "{missing}"], "no API key"),
        (["--api-key-file", "{binary}"], "not an API key"),
    ],
)
def test_serve_refuses_before_it_serves(checkpoints, tmp_path, capsys, arguments, part):
    files = {name: tmp_path / name for name in ("empty", "missing", "binary")}
    files["empty"].write_text("\n")
    files["binary"].write_bytes(b"\xff\xfe")
    arguments = [argument.format(**files) for argument in arguments]
    port = [] if "--port" in arguments else ["--port", "0"]
    assert main(["serve", str(checkpoints["unit-35b"]), *port, *arguments]) == EXIT_CODE
    line = capsys.readouterr().err.strip()
    assert line.startswith("edge0: ") and part in line and len(line.splitlines()) == 1


def test_a_wrong_directory_is_told_as_such(tmp_path, capsys):
    for command in ("serve", "chat"):
        assert main([command, str(tmp_path)]) == EXIT_CODE
        assert "config.json" in capsys.readouterr().err
