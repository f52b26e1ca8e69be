# Memory by named counters: the rows of Table 3's session, nothing measured anew.
localrules:
    memory,


rule memory_table:
    input:
        session=tab3_session,
        claims="results/paper/claims.yaml",
    output:
        table=f"{RESULTS}/memory/table.md",
        rows=multiext(
            f"{RESULTS}/memory/",
            "summary.csv",
            "price.csv",
            "compare.csv",
            "memory.svg",
            "memory.png",
        ),
    log:
        f"{RESULTS}/logs/memory-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.memory {input.session:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule memory:
    input:
        f"{RESULTS}/memory/table.md",
    log:
        f"{RESULTS}/logs/memory.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input} | tee {log}"
