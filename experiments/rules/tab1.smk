# Table 1: decode with small and large banks, prompts cold and warm, memory, sizes and the arithmetic of the shapes.
import re
from pathlib import Path

from edge0.families import read_config
from edge0.tiers import find_tier
from experiments.architecture import floor_share


localrules:
    tab1,
    math,


TAB1 = f"{OURS}/tab1"
# Tier to its checkpoint: one of each model, or the checkpoint of one's own alone.
TAB1_MODELS = (
    {tier: f"models/{tier}" for tier in WORKFLOW.values["tab1_tiers"]}
    if WORKFLOW.synthesised
    else {WORKFLOW.name: WORKFLOW.model}
)


# Each tier is served at its family's K, with the smallest bank that this needs and with the arms' own large one.
TAB1_KS = {
    tier: (
        find_tier(tier) if WORKFLOW.synthesised else read_config(model)
    ).family.k_served
    for tier, model in TAB1_MODELS.items()
}
TAB1_SESSIONS = {
    tier: WORKFLOW.session_arguments(
        condition=config["tab1_condition"],
        ks=[TAB1_KS[tier]],
        arms=["ondemand", "prerouter", "ondemand-large", "prerouter-large"],
        rounds=config["tab1_rounds"],
        bank=floor_share(find_tier(tier) if WORKFLOW.synthesised else Path(model)),
        trace=None,
    )
    for tier, model in TAB1_MODELS.items()
}


rule tab1_counts:
    input:
        models=list(TAB1_MODELS.values()),
    output:
        f"{TAB1}/sessions/counts.json",
    log:
        f"{TAB1}/logs/counts.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
    shell:
        "{params.python} -m experiments.architecture {output:q} {input.models:q} > {log:q}"


rule tab1_session:
    input:
        model=lambda wildcards: to_measure(
            TAB1_MODELS[wildcards.tier], f"{TAB1}/sessions/{wildcards.tier}"
        ),
    output:
        f"{TAB1}/sessions/{{tier}}/latest.json",
    log:
        f"{TAB1}/logs/session-{{tier}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, TAB1_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        session=lambda wildcards: TAB1_SESSIONS[wildcards.tier],
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {wildcards.tier:q}"
        " --experiment tab1 --root {params.root:q} --log {log:q} {params.session}"


rule tab1_prefill:
    input:
        model=lambda wildcards: to_measure(
            TAB1_MODELS[wildcards.tier],
            f"{TAB1}/sessions/{wildcards.tier}/prefill",
            "prefill.json",
        ),
    output:
        f"{TAB1}/sessions/{{tier}}/prefill/latest.json",
    log:
        f"{TAB1}/logs/prefill-{{tier}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, TAB1_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        k=lambda wildcards: TAB1_KS[wildcards.tier],
        tokens=config["tab1_prompt_tokens"],
        rounds=config["tab1_prefill_rounds"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.prefill_cost {input.model:q} {params.out:q} --ways auto --k {params.k}"
        " --tier {wildcards.tier:q}"
        " --lengths {params.tokens} --rounds {params.rounds} > {log:q}"


rule tab1_table:
    input:
        counts=f"{TAB1}/sessions/counts.json",
        sessions=expand(f"{TAB1}/sessions/{{tier}}/latest.json", tier=TAB1_MODELS),
        prefills=lambda wildcards: [
            measured(f"{TAB1}/sessions/{tier}/prefill", "prefill.json", "tab1")
            for tier in TAB1_MODELS
        ],
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{TAB1}/",
            "summary.csv",
            "prefill.csv",
            "sizes.csv",
            "compare.csv",
            "tab1.svg",
            "tab1.png",
        ),
        table=f"{TAB1}/table.md",
    log:
        f"{TAB1}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.tab1 {input.counts:q} --sessions {input.sessions:q} --prefills {input.prefills:q}"
        " --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule tab1:
    input:
        f"{TAB1}/table.md",
    log:
        f"{TAB1}/logs/tab1.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"


# The contract of 1%: every path's arithmetic against unpacked weights.
MATH = f"{OURS}/math"
MATH_MODELS = (
    {tier: f"models/{tier}" for tier in ("unit-35b", "unit-8b")}
    if WORKFLOW.synthesised
    else {WORKFLOW.name: WORKFLOW.model}
)


rule math_residual:
    input:
        model=lambda wildcards: to_measure(
            MATH_MODELS[wildcards.tier],
            f"{MATH}/sessions/{wildcards.tier}",
            "residuals.json",
        ),
    output:
        f"{MATH}/sessions/{{tier}}/latest.json",
    log:
        f"{MATH}/logs/{{tier}}.log",
    wildcard_constraints:
        tier="|".join(map(re.escape, MATH_MODELS)),
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        started=STARTED,
    shell:
        "{params.python} -m experiments.math_residual {input.model:q} {params.out:q} > {log:q}"


rule math_table:
    input:
        paths=lambda wildcards: [
            measured(f"{MATH}/sessions/{tier}", "residuals.json", "math")
            for tier in MATH_MODELS
        ],
        claims="results/paper/claims.yaml",
    output:
        rows=multiext(f"{MATH}/", "summary.csv", "compare.csv"),
        table=f"{MATH}/table.md",
    log:
        f"{MATH}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.math_residual {input.paths:q} --claims {input.claims:q} --out {params.out:q}"
        " > {log:q}"


rule math:
    input:
        f"{MATH}/table.md",
    log:
        f"{MATH}/logs/math.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
