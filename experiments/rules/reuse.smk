# How far routes repeat: a trace recorded from the tier's model, then counted. No time is measured.
REUSE = f"{RESULTS}/reuse"
REUSE_TOKENS = 256


localrules:
    reuse,


rule reuse_trace:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, REUSE, "trace.safetensors"),
    output:
        f"{REUSE}/sessions/trace.safetensors",
    log:
        f"{REUSE}/logs/reuse-trace.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
        tokens=REUSE_TOKENS,
        k=max(WORKFLOW.values["ks"]),
        adapter=(
            f"--adapter-k {WORKFLOW.values['adapter_k']}"
            if WORKFLOW.values.get("adapter_k") is not None
            else ""
        ),
        seed=config["seed"],
    shell:
        "{params.python} -m edge0.cli trace record {input.model:q} {output:q} --tokens {params.tokens}"
        " --k {params.k} {params.adapter} --prerouter off --temperature 0.7 --seed {params.seed} > {log:q}"


rule reuse_table:
    input:
        trace=f"{REUSE}/sessions/trace.safetensors",
        claims="results/paper/claims.yaml",
    output:
        table=f"{REUSE}/table.md",
        rows=multiext(
            f"{REUSE}/",
            "summary.csv",
            "compare.csv",
            "reuse.svg",
            "reuse.png",
        ),
    log:
        f"{REUSE}/logs/reuse-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.reuse {input.trace:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule reuse:
    input:
        f"{REUSE}/table.md",
    log:
        f"{REUSE}/logs/reuse.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
