# Other engines beside ours, each an arm of one session: warm, and under enforced limits on the whole process.
# Their packages and files lie in a folder of their own, made when it is asked for; where that fails, a document says why.
from experiments.peers.ready import limited_arguments, was_built

PEERS = WORKFLOW.values["peers_folder"]
PEER_FILES = f"{PEERS}/{WORKFLOW.name}"
PEER_LIMITS = {
    f"{share:g}": k
    for share, k in zip(
        WORKFLOW.values["peers_limits"], WORKFLOW.values["peers_limit_ks"]
    )
}
OUR_PEERS = "ondemand prerouter resident ondemand-mmap prerouter-mmap"
DIRECT_PEERS = "ondemand-direct prerouter-direct"  # under a limit only: elsewhere the page cache is a help
# In these an arm meets nearly every expert: where all fit, all are to be there.
WARM_STEPS = 64
LIMITED_TIMEOUT_S = 900  # a mapped file that thrashes may take seconds a token; slower than that has no number


localrules:
    peers,


rule peers_library:
    output:
        f"{PEERS}/library.json",
    log:
        f"{PEERS}/logs/library.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside a compiler would be disturbed
    params:
        python=sys.executable,
        folder=f"{PEERS}/packages",
        tried=lambda wildcards: (
            "built" if was_built(Path(f"{PEERS}/library.json")) else STARTED
        ),
    shell:
        "{params.python} -m experiments.peers.library {params.folder:q} {output:q} > {log:q}"


rule peers_file:
    input:
        model=lambda wildcards: ancient(WORKFLOW.model),
        library=f"{PEERS}/library.json",
    output:
        f"{PEER_FILES}/{{kind}}.json",
    log:
        f"{PEER_FILES}/logs/{{kind}}.log",
    wildcard_constraints:
        kind="q4_0|q4_1|f32",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        folder=f"{PEERS}/packages",
        gguf=lambda wildcards: f"{PEER_FILES}/{wildcards.kind}.gguf",
    shell:
        "{params.python} -m experiments.peers.gguf {input.model:q} {params.gguf:q} {wildcards.kind}"
        " --library {params.folder:q} > {log:q}"


rule peers_check:
    input:
        model=lambda wildcards: ancient(WORKFLOW.model),
        files=expand(f"{PEER_FILES}/{{kind}}.json", kind=("f32", "q4_1")),
    output:
        f"{PEER_FILES}/check.json",
    log:
        f"{PEER_FILES}/logs/check.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
    shell:
        "{params.python} -m experiments.peers.check {input.model:q} {output:q} {input.files:q} > {log:q}"


rule peers_session:
    input:
        model=lambda wildcards: to_measure(
            WORKFLOW.model, f"{RESULTS}/peers/sessions/warm"
        ),
        library=f"{PEERS}/library.json",
        file=f"{PEER_FILES}/q4_0.json",
    output:
        f"{RESULTS}/peers/sessions/warm/latest.json",
    log:
        f"{RESULTS}/logs/peers-warm.log",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output[0], parent=True),
        arms=OUR_PEERS,
        session=WORKFLOW.session_arguments(
            condition="warm",
            ks=[max(WORKFLOW.values["ks"])],
            kernels="auto",
            bank=1.0,
            warmup_steps=WARM_STEPS,
            lora=False,
            trace=None,
        ),
        started=STARTED,
    shell:
        "{params.python} -m experiments.session --model {input.model:q} --tier {params.name:q}"
        " --experiment peers --root {params.root:q} --log {log:q} {params.session} --arms {params.arms}"
        " $({params.python} -m experiments.peers.ready {input.library:q} {input.file:q})"


rule peers_limited_session:
    input:
        # MLX has its CPU kernels compiled when an arm first needs them, and kept in the folder of temporary files: the
        # compiler's memory would count against the limit, so each arm has run before.
        compiled=ancient(f"{RESULTS}/peers/sessions/warm/latest.json"),
        model=WORKFLOW.model,
        library=f"{PEERS}/library.json",
        file=f"{PEER_FILES}/q4_0.json",
        records=RECORDS or [],
    output:
        limit=f"{RESULTS}/peers/sessions/limit-{{share}}/limit.json",
        session=f"{RESULTS}/peers/sessions/limit-{{share}}/latest.json",
    log:
        f"{RESULTS}/logs/peers-limit-{{share}}.log",
    wildcard_constraints:
        share=r"0\.\d+",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,
    params:
        python=sys.executable,
        name=WORKFLOW.name,
        root=subpath(output.session, parent=True),
        arms=f"{OUR_PEERS} {DIRECT_PEERS}" if RECORDS else OUR_PEERS,
        timeout=LIMITED_TIMEOUT_S,
        session=lambda wildcards: limited_arguments(
            WORKFLOW, float(wildcards.share), PEER_LIMITS[wildcards.share]
        ),
        records=f"--records {RECORDS}" if RECORDS else "",
        started=STARTED,
    shell:
        # Where no limit can be enforced, limit.json says why and there is no session.
        "limit=$({params.python} -m experiments.budgets.memory_limit {input.model:q} {wildcards.share} {output.limit:q}"
        " 2> {log:q}) && if [ $limit -gt 0 ]; then"
        " {params.python} -m experiments.session --model {input.model:q} {params.records} --tier {params.name:q}"
        " --experiment peers-limited --root {params.root:q} --log {log:q} --memory-limit-bytes $limit"
        " --run-timeout-s {params.timeout} {params.session} --arms {params.arms}"
        " $({params.python} -m experiments.peers.ready {input.library:q} {input.file:q});"
        " else echo '{{}}' > {output.session:q}; fi"


rule peers_table:
    input:
        warm=f"{RESULTS}/peers/sessions/warm/latest.json",
        limited=expand(
            f"{RESULTS}/peers/sessions/limit-{{share}}/latest.json",
            share=list(PEER_LIMITS),
        ),
        limits=expand(
            f"{RESULTS}/peers/sessions/limit-{{share}}/limit.json",
            share=list(PEER_LIMITS),
        ),
        library=f"{PEERS}/library.json",
        file=f"{PEER_FILES}/q4_0.json",
        check=f"{PEER_FILES}/check.json",
    output:
        multiext(
            f"{RESULTS}/peers/",
            "summary.csv",
            "ratios.csv",
            "goals.csv",
            "peers.svg",
            "peers.png",
        ),
        table=f"{RESULTS}/peers/table.md",
    log:
        f"{RESULTS}/logs/peers-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.peers {input.warm:q} --limited {input.limited:q} --limits {input.limits:q}"
        " --library {input.library:q} --file {input.file:q} --check {input.check:q} --out {params.out:q} > {log:q}"


rule peers:
    input:
        f"{RESULTS}/peers/table.md",
    log:
        f"{RESULTS}/logs/peers.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"


rule peers_lib:
    name:
        "peers-lib"
    input:
        f"{PEERS}/library.json",
    log:
        f"{PEERS}/logs/peers-lib.log",
    localrule: True
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
