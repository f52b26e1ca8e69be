# The recorded benchmark: what the engine must show, as measures with intervals. A missed goal is a row, not a failure.
BENCH = f"{OURS}/bench"
SPEED_ARMS = (
    "ondemand prerouter ondemand-mmap prerouter-mmap"
    " ondemand-records prerouter-records ondemand-direct prerouter-direct"
).split()


rule bench_overlap_session:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{BENCH}/sessions/overlap"
        ),
    output:
        f"{BENCH}/sessions/overlap/latest.json",
    log:
        f"{BENCH}/logs/overlap.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            condition="budget:0.25",
            ks=[8],
            arms=["ondemand", "prerouter"],
            rounds=config["bench_rounds"],
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier mini-35b"
        " --experiment overlap --root {params.root:q} --log {log:q} {params.session}"


rule bench_resident_session:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{BENCH}/sessions/resident"
        ),
    output:
        f"{BENCH}/sessions/resident/latest.json",
    log:
        f"{BENCH}/logs/resident.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            condition="warm",
            ks=[8],
            arms=["ondemand", "resident"],
            rounds=config["bench_rounds"],
            bank=1.0,
            lora=False,
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier mini-35b"
        " --experiment resident --root {params.root:q} --log {log:q} {params.session}"


# By the engine's own kernels where they run, as a user has it: Table 3's arms, and those from the repacked checkpoint.
rule bench_speed_session:
    input:
        model=lambda wildcards: to_measure("models/mini-35b", f"{BENCH}/sessions/speed"),
        records=lambda wildcards: to_measure(
            "models/mini-35b-records", f"{BENCH}/sessions/speed"
        ),
    output:
        f"{BENCH}/sessions/speed/latest.json",
    log:
        f"{BENCH}/logs/speed.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        root=subpath(output[0], parent=True),
        session=WORKFLOW.session_arguments(
            condition="budget:0.5",
            ks=[8],
            arms=SPEED_ARMS,
            kernels="auto",
            rounds=config["bench_rounds"],
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --records {input.records:q} --tier mini-35b"
        " --experiment speed --root {params.root:q} --log {log:q} {params.session}"


rule bench_reads:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{BENCH}/sessions/reads", "reads.json"
        ),
    output:
        f"{BENCH}/sessions/reads/latest.json",
    log:
        f"{BENCH}/logs/reads.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        threads=WORKFLOW.values["reader_threads"],
        started=STARTED,
    shell:
        "{params.python} -m experiments.read_cost {input.model:q} {params.out:q} --threads {params.threads} > {log:q}"


rule bench_kernels:
    input:
        model=lambda wildcards: to_measure(
            "models/mini-35b", f"{BENCH}/sessions/kernels", "kernels.json"
        ),
    output:
        f"{BENCH}/sessions/kernels/latest.json",
    log:
        f"{BENCH}/logs/kernels.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        started=STARTED,
    shell:
        "{params.python} -m experiments.kernel_cost {input.model:q} {params.out:q} > {log:q}"


# Makes its own checkpoints, which go with the run.
rule bench_work:
    input:
        source=lambda wildcards: to_measure(
            "experiments/work_cost.py", f"{BENCH}/sessions/work", "work.json"
        ),
    output:
        f"{BENCH}/sessions/work/latest.json",
    log:
        f"{BENCH}/logs/work.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        out=subpath(output[0], parent=True),
        started=STARTED,
    shell:
        "mkdir -p models && {params.python} -m experiments.work_cost models {params.out:q} > {log:q}"


rule bench_measures:
    input:
        overlap=f"{BENCH}/sessions/overlap/latest.json",
        resident=f"{BENCH}/sessions/resident/latest.json",
        speed=f"{BENCH}/sessions/speed/latest.json",
        reads=lambda wildcards: measured(
            f"{BENCH}/sessions/reads", "reads.json", "bench"
        ),
        kernels=lambda wildcards: measured(
            f"{BENCH}/sessions/kernels", "kernels.json", "bench"
        ),
        work=lambda wildcards: measured(f"{BENCH}/sessions/work", "work.json", "bench"),
    output:
        overlap=f"{BENCH}/measures/overlap.json",
        resident=f"{BENCH}/measures/resident.json",
        speed=f"{BENCH}/measures/speed.json",
        reads=f"{BENCH}/measures/reads.json",
        kernels=f"{BENCH}/measures/kernels.json",
        work=f"{BENCH}/measures/work.json",
    log:
        f"{BENCH}/logs/measures.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
    shell:
        "for kind in overlap resident speed reads kernels work; do "
        "case $kind in overlap) from={input.overlap}; to={output.overlap};; "
        "resident) from={input.resident}; to={output.resident};; "
        "speed) from={input.speed}; to={output.speed};; "
        "reads) from={input.reads}; to={output.reads};; "
        "kernels) from={input.kernels}; to={output.kernels};; "
        "work) from={input.work}; to={output.work};; esac; "
        "{params.python} -m analysis.measures $kind $from $to; done > {log:q}"


rule bench_compare:
    name:
        "bench-compare"
    log:
        f"{BENCH}/logs/compare.log",
    localrule: True
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        a=lambda wildcards: config["bench_a"] or "",
        b=lambda wildcards: config["bench_b"] or "",
        bench=BENCH,
    shell:
        # Of a pipe the first failure counts: Snakemake's shells run with pipefail.
        "{params.python} -m analysis.bench_compare {params.a:q} {params.b:q} --bench {params.bench:q} | tee {log:q}"


rule bench_table:
    input:
        f"{BENCH}/measures/overlap.json",
        f"{BENCH}/measures/resident.json",
        f"{BENCH}/measures/speed.json",
        f"{BENCH}/measures/reads.json",
        f"{BENCH}/measures/kernels.json",
        f"{BENCH}/measures/work.json",
    output:
        csv=f"{BENCH}/bench.csv",
        table=f"{BENCH}/table.md",
    log:
        f"{BENCH}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.csv, parent=True),
    shell:
        "{params.python} -m analysis.bench --out {params.out:q} --title Benchmark --row-files {input} > {output.table} 2> {log:q}"
