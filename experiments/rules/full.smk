# The published shapes with random weights, larger than the memory that they are given (of the bank one token's experts
# and the next one's prefetch): Table 3's arms, a session for each K, on routes of which a quarter repeat, as the paper's
# do. With full_direct=true also from a repacked copy past the page cache: reads that take little processor time.
from edge0.tiers import find_tier
from experiments.architecture import floor_share

FULL_ARMS = ["ondemand", "prerouter", "ondemand-mmap", "prerouter-mmap"]
FULL_DIRECT_ARMS = ["ondemand-direct", "prerouter-direct"]
FULL_STEPS = {"warmup_steps": 6, "timed_steps": 10}
FULL_PROMPT_TOKENS = 4  # each routes for itself and reads its own experts
FULL_REUSE = 0.25


localrules:
    full,


rule full_trace:
    input:
        model=lambda wildcards: to_measure(
            f"models/{wildcards.tier}",
            f"{OURS}/{wildcards.tier}/full/sessions/k{wildcards.k}",
        ),
    output:
        f"{OURS}/{{tier}}/full/sessions/k{{k}}/trace.safetensors",
    log:
        f"{OURS}/{{tier}}/full/logs/trace-k{{k}}.log",
    wildcard_constraints:
        tier="shape-(35b|8b)",
        k=r"\d+",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        tokens=sum(FULL_STEPS.values()) + 1,
        reuse=FULL_REUSE,
        seed=config["seed"],
    shell:
        "{params.python} -m edge0.cli verify {input.model:q} > {log:q} &&"
        " {params.python} -m edge0.cli trace generate {output:q} --model {input.model:q} --k {wildcards.k}"
        " --tokens {params.tokens} --reuse {params.reuse} --seed {params.seed} >> {log:q}"


rule full_session:
    input:
        model=lambda wildcards: to_measure(
            f"models/{wildcards.tier}",
            f"{OURS}/{wildcards.tier}/full/sessions/k{wildcards.k}",
        ),
        records=(
            ancient("models/{tier}-records") if WORKFLOW.values["full_direct"] else []
        ),
        trace=f"{OURS}/{{tier}}/full/sessions/k{{k}}/trace.safetensors",
    output:
        f"{OURS}/{{tier}}/full/sessions/k{{k}}/latest.json",
    log:
        f"{OURS}/{{tier}}/full/logs/session-k{{k}}.log",
    wildcard_constraints:
        tier="shape-(35b|8b)",
        k=r"\d+",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        prompt=FULL_PROMPT_TOKENS,
        records=lambda wildcards, input: (
            f"--records {input.records}" if input.records else ""
        ),
        session=lambda wildcards, input: WORKFLOW.session_arguments(
            ks=[wildcards.k],
            arms=FULL_ARMS + (FULL_DIRECT_ARMS if input.records else []),
            adapter_k=find_tier(wildcards.tier).ks[0],
            trace=input.trace,
            rounds=config["full_rounds"],
            bank=floor_share(find_tier(wildcards.tier), int(wildcards.k)),
            kernels="auto",
            **FULL_STEPS,
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} {params.records} --tier {wildcards.tier}"
        " --experiment full --root {params.root:q} --log {log:q} --prompt-tokens {params.prompt} {params.session}"


rule full_tables:
    input:
        session=f"{OURS}/{{tier}}/full/sessions/k{{k}}/latest.json",
        claims="results/paper/claims.yaml",
    output:
        speed=f"{OURS}/{{tier}}/full/k{{k}}/table.md",
        memory=f"{OURS}/{{tier}}/full/k{{k}}-memory/table.md",
        measures=f"{OURS}/{{tier}}/full/k{{k}}/measures.json",
    log:
        f"{OURS}/{{tier}}/full/logs/tables-k{{k}}.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        speed=subpath(output.speed, parent=True),
        memory=subpath(output.memory, parent=True),
    shell:
        "{params.python} -m analysis.tab3 {input.session:q} --claims {input.claims:q} --out {params.speed:q} > {log:q} &&"
        " {params.python} -m analysis.memory {input.session:q} --claims {input.claims:q} --out {params.memory:q} >> {log:q} &&"
        " {params.python} -m analysis.measures speed {input.session:q} {output.measures:q} >> {log:q}"


rule full:
    input:
        expand(
            f"{OURS}/{{tier}}/full/k{{k}}{{kind}}/table.md",
            tier=config["full_tiers"],
            k=config["full_ks"],
            kind=("", "-memory"),
        ),
    log:
        f"{OURS}/logs/full.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
