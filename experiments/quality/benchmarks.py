"""The five benchmarks: which OpenCompass module asks and scores each, which file it reads, and where that comes from.

Nothing here imports OpenCompass or reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONFIGS = "opencompass.configs.datasets"
SCORING = "experiments.quality.scoring"


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
            "30 lines with the keys problem and answer; the problems are the MAA's, no source gives terms to copy them",
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
            "MIT; laid out from the package human-eval",
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
            "gpqa_diamond.csv of its authors (CC BY 4.0); they ask that it never be put online as plain text",
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
            "the data set TIGER-Lab/MMLU-Pro (MIT), as test.jsonl and validation.jsonl or as its own Parquet files",
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
            "IFBench_test.jsonl of the repository allenai/IFBench (data ODC-BY 1.0); it also needs NLTK data",
        ),
    )
}
