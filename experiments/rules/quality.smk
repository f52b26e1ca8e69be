# Table 2: five benchmarks through OpenCompass, the int4 checkpoint as it is served beside its original.
import re
from pathlib import Path


localrules:
    tab2,
    fig2,
    quality_data,


TAB2 = f"{OURS}/tab2"
QUALITY_PYTHON = ".venv-quality/bin/python"
# Tier to its checkpoint and its original: those that were trained here, or a checkpoint of one's own with quality_fp.
QUALITY_MODELS = (
    {
        tier: (f"models/{tier}", f"experiments/teachers/{tier}/original.safetensors")
        for tier in WORKFLOW.values["quality_tiers"]
    }
    if WORKFLOW.synthesised
    else {WORKFLOW.name: (WORKFLOW.model, WORKFLOW.values["quality_fp"])}
)
STAND_INS = f"models/quality/stand-ins-{WORKFLOW.values['quality_questions']}"
NO_ORIGINAL = Edge0Error(
    ErrorKind.OPTION_INVALID,
    "Table 2 compares a checkpoint with its original",
    path=PLACE,
    tensor="quality_fp",
    expected="directory of the full-precision model",
    found="null",
)
QUALITY_DATA = WORKFLOW.values["quality_data"]  # null: the stand-ins


# About 2.3 GB from the package index: its versions are exact and differ from those of .venv.
rule quality_env:
    name:
        "quality-env"
    input:
        requirements=ancient("experiments/quality/requirements.txt"),
    output:
        touch(".venv-quality/.installed"),
    log:
        f"{OURS}/logs/quality-env.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        folder=subpath(output[0], parent=True),
        versions=Path("experiments/quality/requirements.txt").read_text(),
    shell:
        # A link's target belongs to somebody else.
        "if test -L {params.folder:q}; then echo 'edge0: {params.folder} is a link: remove it first' >&2; exit 2; fi &&"
        " {params.python} -m venv --clear {params.folder:q} > {log:q} 2>&1 &&"
        " {params.folder:q}/bin/python -m pip install --no-compile --disable-pip-version-check -r {input.requirements:q} >> {log:q} 2>&1 &&"
        " {params.folder:q}/bin/python -m pip install --no-compile --disable-pip-version-check --no-deps -e . >> {log:q} 2>&1 ||"
        " {{ tail -n 5 {log:q} >&2; exit 1; }}"


rule quality_data:
    output:
        f"{STAND_INS}/stand-in.json",
    log:
        f"{OURS}/logs/quality-data.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        questions=WORKFLOW.values["quality_questions"],
        seed=WORKFLOW.values["seed"],
    shell:
        "{params.python} -m edge0.cli quality data {params.root:q} --stand-in --questions {params.questions}"
        " --seed {params.seed} > {log:q}"


rule quality_run:
    input:
        ".venv-quality/.installed",
        stand_ins=[] if QUALITY_DATA else f"{STAND_INS}/stand-in.json",
        original=lambda wildcards: QUALITY_MODELS[wildcards.tier][1]
        or refuse(NO_ORIGINAL),
        model=lambda wildcards: to_measure(
            QUALITY_MODELS[wildcards.tier][0],
            f"{OURS}/{wildcards.tier}/quality/sessions",
            "quality.json",
        ),
    output:
        f"{OURS}/{{tier}}/quality/sessions/latest.json",
    log:
        f"{OURS}/{{tier}}/quality/logs/run.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, QUALITY_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=QUALITY_PYTHON,
        data=lambda wildcards, input: QUALITY_DATA or Path(input.stand_ins).parent,
        # A tier that was trained here has the heads and the LoRA of one K.
        k=f"--k {LADDER_K}" if WORKFLOW.synthesised else "",
        out=subpath(output[0], parent=True),
        started=STARTED,
    shell:
        "{params.python} -m experiments.quality.run {input.model:q} --tier {wildcards.tier:q} --fp {input.original:q}"
        " --data {params.data:q} {params.k} --out {params.out:q} --cross-check ifbench --log {log:q}"


rule tab2_table:
    input:
        qualities=lambda wildcards: [
            measured(
                f"{OURS}/{tier}/quality/sessions",
                "quality.json",
                "tab2",
                "fig2",
                "quality",
            )
            for tier in QUALITY_MODELS
        ],
        claims="results/paper/claims.yaml",
    output:
        multiext(f"{TAB2}/", "fig2.svg", "summary.csv", "questions.csv", "compare.csv"),
        f"{TAB2}/fig2.png",
        table=f"{TAB2}/table.md",
    log:
        f"{TAB2}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.quality.table {input.qualities:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule tab2:
    input:
        f"{TAB2}/table.md",
    log:
        f"{TAB2}/logs/tab2.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"


rule fig2:
    input:
        multiext(f"{TAB2}/fig2", ".svg", ".png"),
    log:
        f"{TAB2}/logs/fig2.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "echo {input:q} | tee {log:q}"
