# The merge study: what int4 leaves of a recovery LoRA that is merged, and what it costs to keep it unmerged.
import re

from edge0.families import read_config


localrules:
    merge,


MERGE = f"{OURS}/merge"
# The tiers that are trained here, or the checkpoint of one's own alone.
MERGE_MODELS = (
    {tier: f"models/{tier}" for tier in WORKFLOW.values["ladder_tiers"]}
    if WORKFLOW.synthesised
    else {WORKFLOW.name: WORKFLOW.model}
)
# K of the adapters: the ladder's, or what a checkpoint's family serves.
MERGE_KS = {
    tier: (
        WORKFLOW.values["ladder_k"]
        if WORKFLOW.synthesised
        else read_config(model).family.k_served
    )
    for tier, model in MERGE_MODELS.items()
}


rule merge_rows:
    input:
        model=lambda wildcards: to_measure(
            MERGE_MODELS[wildcards.tier],
            f"{MERGE}/sessions/{wildcards.tier}/rows",
            "merge.json",
        ),
    output:
        f"{MERGE}/sessions/{{tier}}/rows/latest.json",
    log:
        f"{MERGE}/logs/rows-{{tier}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, MERGE_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        k=lambda wildcards: MERGE_KS[wildcards.tier],
        seed=config["seed"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.merge {input.model:q} {params.out:q} --k {params.k} --tier {wildcards.tier:q}"
        " --seed {params.seed} > {log:q}"


rule merge_session:
    input:
        model=lambda wildcards: to_measure(
            MERGE_MODELS[wildcards.tier], f"{MERGE}/sessions/{wildcards.tier}/cost"
        ),
    output:
        f"{MERGE}/sessions/{{tier}}/cost/latest.json",
    log:
        f"{MERGE}/logs/session-{{tier}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, MERGE_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        # Experts in memory where they fit, so that what the LoRA costs is arithmetic and not other reads.
        session=lambda wildcards: WORKFLOW.session_arguments(
            experiment="merge",
            condition="warm",
            ks=[MERGE_KS[wildcards.tier]],
            arms=["prerouter", "prerouter-bare"],
            rounds=config["bench_rounds"],
            # A tiny model's step takes milliseconds: many of them, or timing says nothing.
            **({"bank": 1.0, "timed_steps": 200} if WORKFLOW.synthesised else {}),
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {wildcards.tier:q}"
        " --root {params.root:q} --log {log:q} {params.session}"


rule merge_table:
    input:
        rows=lambda wildcards: [
            measured(f"{MERGE}/sessions/{tier}/rows", "merge.json", "merge")
            for tier in MERGE_MODELS
        ],
        sessions=expand(
            f"{MERGE}/sessions/{{tier}}/cost/latest.json", tier=MERGE_MODELS
        ),
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{MERGE}/",
            "summary.csv",
            "cost.csv",
            "compare.csv",
            "merge.svg",
            "merge.png",
        ),
        table=f"{MERGE}/table.md",
    log:
        f"{MERGE}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.merge.table {input.rows:q} --sessions {input.sessions:q} --claims {input.claims:q}"
        " --out {params.out:q} > {log:q}"


rule merge:
    input:
        f"{MERGE}/table.md",
    log:
        f"{MERGE}/logs/merge.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
