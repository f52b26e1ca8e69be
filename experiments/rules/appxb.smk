# Appendix B: stacks, patched stacks and slots; who fills them; launch groups; where the host's time of a step goes.
localrules:
    appxB,


rule appxb_session:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, f"{RESULTS}/appxB/sessions"),
    output:
        f"{RESULTS}/appxB/sessions/latest.json",
    log:
        f"{RESULTS}/logs/appxB-session.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            ks=[max(WORKFLOW.values["ks"])],
            arms=[
                "prerouter",
                "prerouter-stack",
                "prerouter-patch",
                "prerouter-fill",
                "prerouter-groups1",
                "prerouter-groups2",
                "prerouter-groups5",
                "ondemand-stack",
                "ondemand-patch",
                "ondemand",
            ],
            rounds=config["bench_rounds"],
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --experiment appxB --root {params.root:q} --log {log:q} {params.session}"


rule appxb_table:
    input:
        session=f"{RESULTS}/appxB/sessions/latest.json",
        claims="results/paper/claims.yaml",
    output:
        table=f"{RESULTS}/appxB/table.md",
        rows=multiext(
            f"{RESULTS}/appxB/",
            "summary.csv",
            "pairs.csv",
            "compare.csv",
            "appxB.svg",
            "appxB.png",
        ),
    log:
        f"{RESULTS}/logs/appxB-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.appxb {input.session:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule appxB:
    input:
        f"{RESULTS}/appxB/table.md",
    log:
        f"{RESULTS}/logs/appxB.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
