# What the paths and layouts are worth: hot against exact, records against stacked tensors, whole layers against demand.
ENGINE = f"{OURS}/engine"
LAYOUT_ARMS = ["ondemand", "ondemand-records"]
ENGINE_SESSIONS = {
    "records-cold": WORKFLOW.session_arguments(
        condition="cold", ks=[8], arms=LAYOUT_ARMS, rounds=config["bench_rounds"]
    ),
    "records-warm": WORKFLOW.session_arguments(
        condition="warm", ks=[8], arms=LAYOUT_ARMS, rounds=config["bench_rounds"]
    ),
    "hot": WORKFLOW.session_arguments(
        condition="budget:0.5",
        ks=[8],
        arms=["ondemand", "ondemand-hot"],
        rounds=config["bench_rounds"],
        bank=0.5,
    ),
}


rule engine_session:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{ENGINE}/sessions/{wildcards.part}"
        ),
        records="models/mini-35b-records",
    output:
        f"{ENGINE}/sessions/{{part}}/latest.json",
    log:
        f"{ENGINE}/logs/{{part}}.log",
    wildcard_constraints:
        part="records-cold|records-warm|hot",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        session=lambda wildcards: ENGINE_SESSIONS[wildcards.part],
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --records {input.records:q} --tier mini-35b"
        " --experiment {wildcards.part} --root {params.root:q} --log {log:q} {params.session}"


rule engine_prefill:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{ENGINE}/sessions/prefill", "prefill.json"
        ),
    output:
        f"{ENGINE}/sessions/prefill/latest.json",
    log:
        f"{ENGINE}/logs/prefill.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        rounds=config["bench_rounds"],
        lengths=config["prefill_tokens"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.prefill_cost {input.model:q} {params.out:q} --rounds {params.rounds}"
        " --lengths {params.lengths} > {log:q}"


rule engine_endurance:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{ENGINE}/sessions/endurance", "endurance.json"
        ),
    output:
        f"{ENGINE}/sessions/endurance/latest.json",
    log:
        f"{ENGINE}/logs/endurance.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        started=STARTED,
    shell:
        "{params.python} -m experiments.endurance {input.model:q} {params.out:q} > {log:q}"


rule engine_measures:
    input:
        endurance=lambda wildcards: measured(
            f"{ENGINE}/sessions/endurance", "endurance.json", "engine"
        ),
        cold=f"{ENGINE}/sessions/records-cold/latest.json",
        warm=f"{ENGINE}/sessions/records-warm/latest.json",
        hot=f"{ENGINE}/sessions/hot/latest.json",
        prefill=lambda wildcards: measured(
            f"{ENGINE}/sessions/prefill", "prefill.json", "engine"
        ),
    output:
        cold=f"{ENGINE}/measures/records-cold.json",
        warm=f"{ENGINE}/measures/records-warm.json",
        hot=f"{ENGINE}/measures/hot.json",
        prefill=f"{ENGINE}/measures/prefill.json",
        endurance=f"{ENGINE}/measures/endurance.json",
    log:
        f"{ENGINE}/logs/measures.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
    shell:
        "( {params.python} -m analysis.measures layout {input.cold:q} {output.cold:q} &&"
        " {params.python} -m analysis.measures layout {input.warm:q} {output.warm:q} &&"
        " {params.python} -m analysis.measures hot {input.hot:q} {output.hot:q} &&"
        " {params.python} -m analysis.measures prefill {input.prefill:q} {output.prefill:q} &&"
        " {params.python} -m analysis.measures endurance {input.endurance:q} {output.endurance:q} ) > {log:q}"


rule engine_table:
    input:
        rules.engine_measures.output,
    output:
        csv=f"{ENGINE}/bench.csv",
        table=f"{ENGINE}/table.md",
    log:
        f"{ENGINE}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.csv, parent=True),
    shell:
        "{params.python} -m analysis.bench --out {params.out:q} --title 'Paths and layouts of the engine' --row-files {input} > {output.table} 2> {log:q}"
