"""Large pages: when they are asked for, by whom, and that a process that asks really gets them."""

import subprocess
import sys

import pytest

from edge0 import pages

FAR_LARGER = 64 << 20  # bytes; glibc maps what is this large by itself


@pytest.fixture
def asks(monkeypatch):
    """A system on which a process gets large pages by asking."""
    monkeypatch.setattr(pages, "may_ask", lambda: True)


@pytest.mark.parametrize(
    ("text", "found"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("always never\n", None)],
)
def test_the_systems_setting(monkeypatch, tmp_path, text, found):
    monkeypatch.setattr(pages, "SETTING", tmp_path / "enabled")
    assert pages.setting() is None
    (tmp_path / "enabled").write_text(text)
    assert pages.setting() == found


@pytest.mark.parametrize(
    ("library", "setting", "found"),
    [
        (("glibc", "2.35"), "madvise", True),
        (("glibc", "3.0"), "madvise", True),
        (("glibc", "2.31"), "madvise", False),
        (("", ""), "madvise", False),
        (("glibc", "2.36"), "always", False),
        (("glibc", "2.36"), "never", False),
        (("glibc", "2.36"), None, False),
    ],
)
def test_who_may_ask(monkeypatch, library, setting, found):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(pages.platform, "libc_ver", lambda: library)
    monkeypatch.setattr(pages, "setting", lambda: setting)
    assert pages.may_ask() is found
    assert ("asked for by" in pages.describe()) is found
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not pages.may_ask()
    assert pages.describe() == "as the system chooses"


def test_the_environment_of_a_process(asks):
    assert pages.environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert pages.environment({}, large=False) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    other = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert pages.environment(other) == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}


def test_whoever_has_chosen_is_left_alone(asks):
    own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert pages.environment(own) == own


def test_where_nobody_may_ask_the_environment_stays(monkeypatch):
    monkeypatch.setattr(pages, "may_ask", lambda: False)
    assert pages.environment({"A": "b"}) == {"A": "b"}


def test_a_command_starts_anew_once_and_goes_on_where_it_cannot(asks, monkeypatch):
    started = []
    monkeypatch.setattr(pages.os, "execve", lambda *command: started.append(command))
    monkeypatch.setattr(pages.os, "environ", {"A": "b"})
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "edge0.cli", "chat"])
    pages.restart_with_large_pages()
    ((program, arguments, environment),) = started
    assert arguments == [program, "-m", "edge0.cli", "chat"] and program == sys.executable
    monkeypatch.setattr(pages.os, "environ", environment)
    pages.restart_with_large_pages()  # the process that was started
    assert len(started) == 1

    def refuses(*command):
        raise OSError("no memory")

    monkeypatch.setattr(pages.os, "environ", {"A": "b"})
    monkeypatch.setattr(pages.os, "execve", refuses)
    pages.restart_with_large_pages()


PROGRAM = f"""
import sys
from edge0.pages import restart_with_large_pages
print("begun", flush=True)
restart_with_large_pages()
import mlx.core as mx
from edge0.telemetry.memory import process_large_page_bytes
array = mx.ones(({FAR_LARGER // 4},), dtype=mx.float32)
mx.eval(array)
print(process_large_page_bytes(), sys.argv[1:])
"""


@pytest.mark.skipif(not pages.may_ask(), reason=f"this system does not give large pages by asking: {pages.describe()}")
def test_a_process_that_asks_gets_them(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM, "a b"], capture_output=True, text=True, check=True)
    *begun, last = done.stdout.splitlines()
    assert begun == ["begun", "begun"]
    nbytes, arguments = last.split(" ", 1)
    assert arguments == "['a b']"
    assert int(nbytes) >= FAR_LARGER // 2  # a fragmented system gives some, not all
