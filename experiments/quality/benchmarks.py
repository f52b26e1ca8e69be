"""The five benchmarks: which OpenCompass module asks and scores each, which file it reads, and where that comes from.

Nothing here imports OpenCompass or reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONFIGS = "opencompass.configs.datasets"
SCORING = "experiments.quality.scoring"
ENVIRONMENT = ".venv-quality/bin"  # of the quality environment; `make quality` builds it


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Args:
        module, variable: its shipped configuration, and the list of datasets there.
        abbr: name of its dataset in OpenCompass; of the first part of it, where it is cut into categories.
        file: what is read, below the data root; MMLU-Pro may be given in other forms (see `data`).
        rows: questions of the real benchmark.
        limit: tokens of an answer to the real benchmark (max_out_len).
        evaluator: our own in place of the shipped one, by its dotted name.
        verdict: the field of a question's details that says whether it was right; "" where prediction is compared.
        metric: what a question's score is, in words.
        bring: where the real file comes from, and its terms.
        published: first digits of the sha256 of the one published file; "" where none is known, or there are several.
    """

    name: str
    title: str
    module: str
    variable: str
    abbr: str
    file: str
    rows: int
    limit: int
    evaluator: str | None
    verdict: str
    metric: str
    bring: str
    published: str = ""


BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "aime2026",
            "AIME 2026",
            f"{CONFIGS}.aime2026.aime2026_cascade_eval_gen_6ff468",
            "aime2026_datasets",
            "aime2026",
            "data/aime2026/aime2026.jsonl",
            30,
            32768,
            f"{SCORING}.RuleScored",
            "correct",
            "the boxed answer equals the right one, by rule alone (no judging model)",
            'a line {"problem": text, "answer": 0 to 999} for each, of https://huggingface.co/datasets/MathArena/'
            "aime_2026 (non-commercial, see its card; the problems are the MAA's)",
        ),
        Benchmark(
            "humaneval",
            "HumanEval",
            f"{CONFIGS}.humaneval.humaneval_openai_sample_evals_gen_dcae0e",
            "humaneval_datasets",
            "openai_humaneval",
            "data/humaneval/human-eval-v2-20210705.jsonl",
            164,
            8192,
            f"{SCORING}.LocalHumanEval",
            "is_correct",
            "the first code block passes the problem's own test (pass@1)",
            "HumanEval.jsonl.gz of https://github.com/openai/human-eval, unpacked (MIT)",
            "1d49078b",
        ),
        Benchmark(
            "gpqa-diamond",
            "GPQA-Diamond",
            f"{CONFIGS}.gpqa.gpqa_openai_simple_evals_gen_5aeece",
            "gpqa_datasets",
            "GPQA_diamond",
            "data/gpqa/gpqa_diamond.csv",
            198,
            32768,
            None,
            "correct",
            "the letter after ANSWER: is the right one; none is wrong",
            "gpqa_diamond.csv of https://huggingface.co/datasets/Idavidrein/gpqa, its terms accepted (CC BY 4.0; "
            "its authors ask that it never be put online as plain text)",
        ),
        Benchmark(
            "mmlu-pro",
            "MMLU-Pro",
            f"{CONFIGS}.mmlu_pro.mmlu_pro_0shot_cot_gen_08c1de",
            "mmlu_pro_datasets",
            "mmlu_pro_",
            "data/mmlu_pro/test.jsonl",
            12032,
            8192,
            None,
            "",
            "the letter after ANSWER: is the right one; none is wrong; mean over questions, not categories",
            "test.jsonl and validation.jsonl, or the Parquet files in this folder as they are published, of "
            "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro (MIT)",
        ),
        Benchmark(
            "ifbench",
            "IFBench",
            f"{CONFIGS}.IFBench.IFBench_gen",
            "ifbench_datasets",
            "IFBench",
            "data/IFBench/IFBench_test.jsonl",
            300,
            8192,
            None,
            "is_loose_correct",
            "all instructions of a prompt are followed, in the loose reading (prompt-level loose accuracy)",
            "data/IFBench_test.jsonl of https://github.com/allenai/IFBench (ODC-BY 1.0)",
            "a2bf7b8e",
        ),
    )
}
