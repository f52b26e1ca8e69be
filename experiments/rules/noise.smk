# Noise: one arm against itself, so that whatever the pairs show is not an effect.
NOISE = f"{RESULTS}/noise"


localrules:
    noise,


rule noise_session:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, f"{NOISE}/sessions"),
    output:
        f"{NOISE}/sessions/latest.json",
    log:
        f"{NOISE}/logs/noise-session.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            experiment="noise",
            arms=["ondemand"],
            ks=[max(WORKFLOW.values["ks"])],
            rounds=config["noise_rounds"],
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --root {params.root:q} --log {log:q} {params.session}"


rule noise_table:
    input:
        session=f"{NOISE}/sessions/latest.json",
        claims="results/paper/claims.yaml",
    output:
        multiext(f"{NOISE}/", "summary.csv", "compare.csv", "noise.svg", "noise.png"),
        table=f"{NOISE}/table.md",
    log:
        f"{NOISE}/logs/noise-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
        own=subpath(input.session, parent=True),
        tab3=f"{RESULTS}/tab3/sessions",
    shell:
        "{params.python} -m analysis.noise {input.session:q} --sessions {params.own:q} {params.tab3:q}"
        " --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule noise:
    input:
        f"{NOISE}/table.md",
    log:
        f"{NOISE}/logs/noise.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
