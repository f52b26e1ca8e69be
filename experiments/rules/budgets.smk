# Whether a page-cache budget means the same by our own eviction as by the kernel's limit: about 3 minutes.
BUDGETS = f"{RESULTS}/budgets"


localrules:
    budgets,


rule budgets_loads:
    input:
        model=lambda wildcards: to_measure(
            WORKFLOW.model, f"{BUDGETS}/sessions", "agreement.json"
        ),
    output:
        f"{BUDGETS}/sessions/latest.json",
    log:
        f"{BUDGETS}/logs/budgets-loads.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        out=subpath(output[0], parent=True),
        share=config["budget_share"],
        loads=config["budget_loads"],
        seed=config["seed"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.budgets.agreement {input.model:q} {params.out:q} --tier {params.name:q}"
        " --share {params.share} --loads {params.loads} --seed {params.seed} > {log:q}"


rule budgets_table:
    input:
        rows=lambda wildcards: measured(
            f"{BUDGETS}/sessions", "agreement.json", "budgets"
        ),
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{BUDGETS}/",
            "summary.csv",
            "compare.csv",
            "agreement.svg",
            "agreement.png",
        ),
        table=f"{BUDGETS}/table.md",
    log:
        f"{BUDGETS}/logs/budgets-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.agreement {input.rows:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule budgets:
    input:
        f"{BUDGETS}/table.md",
    log:
        f"{BUDGETS}/logs/budgets.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
