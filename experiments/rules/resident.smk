# Stock mlx-lm and the engine on one checkpoint: where all of it fits, and where a process may hold less than it.
localrules:
    resident,


RESIDENT_ARMS = ["ondemand", "prerouter", "resident"]


rule resident_session:
    input:
        model=lambda wildcards: to_measure(
            WORKFLOW.model, f"{RESULTS}/resident/sessions/free"
        ),
    output:
        f"{RESULTS}/resident/sessions/free/latest.json",
    log:
        f"{RESULTS}/logs/resident-free.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            condition="warm",
            ks=[max(WORKFLOW.values["ks"])],
            arms=RESIDENT_ARMS,
            bank=1.0,
            lora=False,
            trace=None,
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --experiment resident --root {params.root:q} --log {log:q} {params.session}"


rule resident_limited_session:
    input:
        model=WORKFLOW.model,
    output:
        limit=f"{RESULTS}/resident/sessions/limited/limit.json",
        session=f"{RESULTS}/resident/sessions/limited/latest.json",
    log:
        f"{RESULTS}/logs/resident-limited.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        share=config["resident_limit"],
        root=subpath(output.session, parent=True),
        # Whatever the limit leaves, no page of an expert is kept: the least that the engine may find.
        session=WORKFLOW.session_arguments(
            condition="cold",
            ks=[max(WORKFLOW.values["ks"])],
            arms=RESIDENT_ARMS,
            lora=False,
            trace=None,
        ),
        started=STARTED,
    shell:
        # Where no limit can be enforced, limit.json says why and there is no session.
        "limit=$({params.python} -m experiments.budgets.memory_limit {input.model:q} {params.share} {output.limit:q} 2> {log:q})"
        " && if [ $limit -gt 0 ]; then"
        " {params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --experiment resident-limited --root {params.root:q} --log {log:q} --memory-limit-bytes $limit"
        " {params.session}; else echo '{{}}' > {output.session:q}; fi"


rule resident_table:
    input:
        free=f"{RESULTS}/resident/sessions/free/latest.json",
        limited=f"{RESULTS}/resident/sessions/limited/latest.json",
        limit=f"{RESULTS}/resident/sessions/limited/limit.json",
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{RESULTS}/resident/",
            "summary.csv",
            "compare.csv",
            "resident.svg",
            "resident.png",
        ),
        table=f"{RESULTS}/resident/table.md",
    log:
        f"{RESULTS}/logs/resident-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.resident {input.free:q} --limited {input.limited:q} --limit {input.limit:q}"
        " --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule resident:
    input:
        f"{RESULTS}/resident/table.md",
    log:
        f"{RESULTS}/logs/resident.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
