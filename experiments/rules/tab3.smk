# Table 3: measure, then analyse; the rows of every session stay under sessions/.
rule tab3_session:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, f"{RESULTS}/tab3/sessions"),
    output:
        f"{RESULTS}/tab3/sessions/latest.json",
    log:
        f"{RESULTS}/logs/tab3-session.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --root {params.root:q} --log {log:q} {params.session}"


rule tab3_table:
    input:
        session=rules.tab3_session.output[0],
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{RESULTS}/tab3/",
            "table.md",
            "summary.csv",
            "pairs.csv",
            "compare.csv",
            "tab3.svg",
            "tab3.png",
        ),
    log:
        f"{RESULTS}/logs/tab3-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
    shell:
        "{params.python} -m analysis.tab3 {input.session:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"
