# The levers one by one: each is an arm beside the same arm without it, on routes with a stated reuse.
LEVERS = f"{RESULTS}/levers"
LEVERS_RECALL = (
    0.8  # of the advice: a share of it is wrong, as it would be of a trained head
)
LEVERS_ARMS = [
    "ondemand-hot",
    "ondemand-hot-layer",
    "ondemand-hot-smallpages",
    "ondemand-hot-advise",
    "prerouter",
    "prerouter-layer",
    "prerouter-smallpages",
    "prerouter-groups1",
    "prerouter-groups2",
    "prerouter-groups5",
    *(["ondemand-hot-records", "prerouter-records"] if RECORDS else []),
]


localrules:
    levers,


rule levers_trace:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, f"{LEVERS}/sessions"),
    output:
        f"{LEVERS}/sessions/trace.safetensors",
    log:
        f"{LEVERS}/logs/levers-trace.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        k=max(WORKFLOW.values["ks"]),
        tokens=config["warmup_steps"] + config["timed_steps"] + 1,
        recall=LEVERS_RECALL,
        seed=config["seed"],
    shell:
        "{params.python} -m edge0.cli trace generate {output:q} --model {input.model:q} --k {params.k}"
        " --tokens {params.tokens} --reuse 0.25 --zipf 0.5 --recall {params.recall} --seed {params.seed} > {log:q}"


rule levers_session:
    input:
        model=lambda wildcards: to_measure(WORKFLOW.model, f"{LEVERS}/sessions"),
        trace=WORKFLOW.values.get("trace") or f"{LEVERS}/sessions/trace.safetensors",
        records=RECORDS or [],
    output:
        f"{LEVERS}/sessions/latest.json",
    log:
        f"{LEVERS}/logs/levers-session.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        records=f"--records {RECORDS}" if RECORDS else "",
        session=WORKFLOW.session_arguments(
            ks=[max(WORKFLOW.values["ks"])],
            arms=LEVERS_ARMS,
            kernels="auto",
            trace=WORKFLOW.values.get("trace")
            or f"{LEVERS}/sessions/trace.safetensors",
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} {params.records} --tier {params.name:q}"
        " --experiment levers --root {params.root:q} --log {log:q} {params.session}"


rule levers_table:
    input:
        session=f"{LEVERS}/sessions/latest.json",
    output:
        table=f"{LEVERS}/table.md",
        rows=multiext(
            f"{LEVERS}/",
            "summary.csv",
            "pairs.csv",
            "levers.svg",
            "levers.png",
        ),
    log:
        f"{LEVERS}/logs/levers-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.levers {input.session:q} --out {params.out:q} > {log:q}"


rule levers:
    input:
        f"{LEVERS}/table.md",
    log:
        f"{LEVERS}/logs/levers.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
