# Predicted decode speed: a session of Table 3's arms, and those that calibrate, measured one after the other because a
# shared machine's speed changes within the hour; then the paper's machines.
PREDICT = f"{RESULTS}/predict"
PREDICT_ROUNDS = min(3, config["rounds"])  # means, not verdicts
PREDICT_SESSIONS = {
    "compute": WORKFLOW.session_arguments(
        condition="warm", bank=1.0, trace=None, rounds=PREDICT_ROUNDS
    ),
    "loads": WORKFLOW.session_arguments(
        condition="warm", trace=None, rounds=PREDICT_ROUNDS
    ),
    "target": WORKFLOW.session_arguments(trace=None, rounds=PREDICT_ROUNDS),
    "cold": WORKFLOW.session_arguments(
        condition="cold", trace=None, rounds=PREDICT_ROUNDS
    ),
}
PREDICT_MACHINES = ["m2-16gb", "m4pro-24gb"]
# This machine's file says what its storage gives to several readers; without one they are taken to share.
PREDICT_MACHINE_FILE = [
    str(path)
    for path in [Path(f"experiments/machines/{MACHINE}.yaml")]
    if path.exists()
]


localrules:
    predict,


rule predict_session:
    input:
        model=lambda wildcards: to_measure(
            WORKFLOW.model, f"{PREDICT}/sessions/{wildcards.part}"
        ),
    output:
        f"{PREDICT}/sessions/{{part}}/latest.json",
    log:
        f"{PREDICT}/logs/{{part}}.log",
    wildcard_constraints:
        part="|".join(PREDICT_SESSIONS),
    priority: 1  # one after the other: nothing between them
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        session=lambda wildcards: PREDICT_SESSIONS[wildcards.part],
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --experiment predict-{wildcards.part} --root {params.root:q} --log {log:q} {params.session}"


# The routes of the very tokens that the target session replayed. Routed natively from the second token on, so that those of its
# prompt are known as well; predicted from the prompt's end on, as its arms are.
rule predict_traces:
    input:
        model=WORKFLOW.model,
        session=f"{PREDICT}/sessions/target/latest.json",
    output:
        [
            f"{PREDICT}/sessions/traces/{route}-k{k}.safetensors"
            for route in ("ondemand", "prerouter")
            for k in WORKFLOW.values["ks"]
        ],
    log:
        f"{PREDICT}/logs/traces.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        sessions=subpath(input.session, parent=True),
        ks=WORKFLOW.values["ks"],
        adapter=(
            f"--adapter-k {WORKFLOW.values['adapter_k']}"
            if WORKFLOW.values.get("adapter_k") is not None
            else ""
        ),
    shell:
        "( name=$({params.python} -c 'import json, sys; print(json.load(open(sys.argv[1]))[\"session\"])' {input.session:q}) &&"
        " folder={params.sessions:q}/$name &&"
        " prompt=$({params.python} -c 'import json, sys; print(json.load(open(sys.argv[1]))[\"prompt_tokens\"])'"
        ' "$folder/session.json") &&'
        " for k in {params.ks}; do"
        " {params.python} -m edge0.cli trace record {input.model:q} {params.out:q}/ondemand-k$k.safetensors"
        ' --tokens-file "$folder/tokens.json" --prompt-tokens 1 --k $k {params.adapter} --prerouter off &&'
        " {params.python} -m edge0.cli trace record {input.model:q} {params.out:q}/prerouter-k$k.safetensors"
        ' --tokens-file "$folder/tokens.json" --prompt-tokens $prompt --k $k {params.adapter} --prerouter route'
        " || exit 1; done ) > {log:q}"


rule predict_table:
    input:
        PREDICT_MACHINE_FILE,
        expand("experiments/machines/{machine}.yaml", machine=PREDICT_MACHINES),
        expand(f"{PREDICT}/sessions/{{part}}/latest.json", part=PREDICT_SESSIONS),
        rules.predict_traces.output,
        fit=f"{RESULTS}/fit/summary.csv",
        claims="results/paper/claims.yaml",
    output:
        multiext(f"{PREDICT}/", "predict.png", "predict.svg"),
        table=f"{PREDICT}/table.md",
        rows=multiext(f"{PREDICT}/", "summary.csv", "gain.csv", "compare.csv"),
    log:
        f"{PREDICT}/logs/predict-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        machines=[MACHINE, *PREDICT_MACHINES],
        name=WORKFLOW.name,
        results=subpath(output.table, ancestor=4),
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.prediction.command --machine {params.machines:q} --tier {params.name:q}"
        " --results {params.results:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule predict:
    input:
        f"{PREDICT}/table.md",
    log:
        f"{PREDICT}/logs/predict.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
