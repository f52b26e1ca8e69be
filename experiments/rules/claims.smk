# The ledger of claims: what is on disk, plus the two targets that cost seconds. It never starts a session.
CLAIMS = f"{OURS}/claims"


localrules:
    claims,


rule claims_counts:
    output:
        f"{CLAIMS}/sessions/counts.json",
    log:
        f"{CLAIMS}/logs/counts.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
    shell:
        "{params.python} -m experiments.architecture {output:q} > {log:q}"


rule claims_table:
    input:
        counts=rules.claims_counts.output,
        # A ledger of what is there needs no more than it, where nothing may be measured.
        math=lambda wildcards: (
            f"{MATH}/compare.csv"
            if STARTED or any(Path(MATH).glob("sessions/*/[!.]*/residuals.json"))
            else []
        ),
        claims="results/paper/claims.yaml",
    output:
        table=f"{CLAIMS}/table.md",
        rows=f"{CLAIMS}/claims.csv",
    log:
        f"{CLAIMS}/logs/table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        results=subpath(output.table, ancestor=2),
        out=subpath(output.table, parent=True),
        # Tables of other targets are no inputs: they would be made first, and a ledger must not measure.
        evidence=sorted(
            f"{path} {path.stat().st_mtime_ns}"
            for pattern in ("*/compare.csv", "*/*/compare.csv")
            for path in Path(OURS).glob(pattern)
        ),
        targets=lambda wildcards: [rule.name for rule in workflow.rules],
    shell:
        "{params.python} -m analysis.paper.ledger {params.results:q} --claims {input.claims:q} --counts {input.counts:q}"
        " --targets {params.targets} --out {params.out:q} > {log:q}"


rule claims:
    input:
        table=f"{CLAIMS}/table.md",
        rows=f"{CLAIMS}/claims.csv",
    log:
        f"{CLAIMS}/logs/claims.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        # Here and not where the ledger is made: a failed job's files would be deleted, and they say why.
        strict="yes" if WORKFLOW.values.get("strict") else "no",
    shell:
        "cat {input.table} | tee {log}; if [ {params.strict} = yes ]; then"
        " {params.python} -m analysis.paper.strict {input.rows:q} | tee -a {log}; fi"
