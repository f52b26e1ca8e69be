# The ladder of quality: teachers that were trained here, and what quantisation, heads, LoRA and distillation do to them.
import re


localrules:
    ladder,


TEACHERS = "experiments/teachers"  # kept in the repository: bf16 weights, and the set that was trained for each
LADDER_TIERS = WORKFLOW.values["ladder_tiers"]
LADDER_K = WORKFLOW.values["ladder_k"]


rule teacher_checkpoint:
    input:
        original=f"{TEACHERS}/{{tier}}/original.safetensors",
        adapters=f"{TEACHERS}/{{tier}}/artifacts",
    output:
        directory("models/{tier}"),
    log:
        "models/logs/quantise-{tier}.log",
    wildcard_constraints:
        tier="tiny-(35b|8b)",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
    shell:
        "{params.python} -m edge0.cli train quantise {input.original:q} {output:q} > {log:q} 2>&1"
        " && cp -r {input.adapters:q} {output:q}/artifacts"


rule ladder_run:
    input:
        model=lambda wildcards: to_measure(
            f"models/{wildcards.tier}",
            f"{OURS}/{wildcards.tier}/ladder/sessions/seed{wildcards.seed}",
            "ladder.json",
        ),
        original=f"{TEACHERS}/{{tier}}/original.safetensors",
    output:
        f"{OURS}/{{tier}}/ladder/sessions/seed{{seed}}/latest.json",
    log:
        f"{OURS}/{{tier}}/ladder/logs/seed{{seed}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, LADDER_TIERS)),
        seed=r"\d+",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        work=lambda wildcards: f"models/ladder/{wildcards.tier}/k{LADDER_K}-seed{wildcards.seed}",
        k=LADDER_K,
        held=WORKFLOW.values["ladder_held"],
        controls=lambda wildcards: (
            "--controls"
            if int(wildcards.seed) in WORKFLOW.values["ladder_controls"]
            else ""
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.training.ladder {input.model:q} --original {input.original:q} --root {params.out:q}"
        " --work {params.work:q} --tier {wildcards.tier:q} --k {params.k} --seed {wildcards.seed} --held {params.held}"
        " {params.controls} 2> {log:q}"


rule ladder_table:
    input:
        runs=lambda wildcards: [
            measured(
                f"{OURS}/{wildcards.tier}/ladder/sessions/seed{seed}",
                "ladder.json",
                "ladder",
            )
            for seed in WORKFLOW.values["ladder_seeds"]
        ],
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{OURS}/{{tier}}/ladder/",
            "ladder.svg",
            "summary.csv",
            "pairs.csv",
            "compare.csv",
        ),
        f"{OURS}/{{tier}}/ladder/ladder.png",
        table=f"{OURS}/{{tier}}/ladder/table.md",
    log:
        f"{OURS}/{{tier}}/ladder/logs/table.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, LADDER_TIERS)),
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.ladder.table {input.runs:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule ladder:
    input:
        expand(f"{OURS}/{{tier}}/ladder/table.md", tier=LADDER_TIERS),
    log:
        f"{OURS}/logs/ladder.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
