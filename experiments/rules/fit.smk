# What a load costs by its cold share: single loads with a set share, the lines through them, and anybody's own rows.
FIT = f"{RESULTS}/fit"
REGRESS_ROWS = config.get("rows") or ""
REGRESS = f"{OURS}/regress/{Path(REGRESS_ROWS).parent.name or 'here'}-{Path(REGRESS_ROWS).stem or 'none'}"


localrules:
    fit,
    fig3,
    regress,


rule fit_loads:
    input:
        model=lambda wildcards: to_measure(
            WORKFLOW.model, f"{FIT}/sessions", "loads.json"
        ),
        records=RECORDS or [],
    output:
        f"{FIT}/sessions/latest.json",
    log:
        f"{FIT}/logs/fit-loads.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        out=subpath(output[0], parent=True),
        records=f"--records {RECORDS}" if RECORDS else "",
        loads=config["fit_loads"],
        seed=config["seed"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.load_cost {input.model:q} {params.out:q} {params.records}"
        " --loads {params.loads} --tier {params.name:q} --seed {params.seed} > {log:q}"


rule fit_table:
    input:
        rows=lambda wildcards: measured(f"{FIT}/sessions", "loads.json", "fit", "fig3"),
        session=tab3_session_if_any,  # arms of Table 3 stand in the figure; a fit measures none
        claims="results/paper/claims.yaml",
    output:
        multiext(
            f"{FIT}/",
            "summary.csv",
            "compare.csv",
            "residuals.csv",
            "layouts.csv",
            "fig3.svg",
            "fig3.png",
        ),
        table=f"{FIT}/table.md",
    log:
        f"{FIT}/logs/fit-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
        session=lambda wildcards, input: (
            f"--session {input.session}" if input.session else ""
        ),
        least=f"--least {min(30, int(config['fit_loads']))}",
    shell:
        "{params.python} -m analysis.fit.table {input.rows:q} --claims {input.claims:q} {params.session} {params.least}"
        " --out {params.out:q} > {log:q}"


rule fit:
    input:
        f"{FIT}/table.md",
    log:
        f"{FIT}/logs/fit.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"


rule fig3:
    input:
        figure=f"{FIT}/fig3.png",
        table=f"{FIT}/table.md",
    log:
        f"{FIT}/logs/fig3.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "( cat {input.table:q}; echo; echo 'Figure 3: {input.figure}' ) | tee {log:q}"


rule regress_table:
    input:
        REGRESS_ROWS or [],
    output:
        multiext(
            f"{REGRESS}/", "summary.csv", "residuals.csv", "regress.svg", "regress.png"
        ),
        table=f"{REGRESS}/table.md",
    log:
        f"{REGRESS}/logs/regress-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
        options=config.get("regress_options") or "",
    shell:
        "{params.python} -m analysis.fit.regress {input:q} {params.options} --out {params.out:q} > {log:q}"


rule regress:
    input:
        f"{REGRESS}/table.md",
    log:
        f"{REGRESS}/logs/regress.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
