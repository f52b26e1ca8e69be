# Table 4 is another reading of Table 3's rows: bytes, loads and cold shares of its session.
TAB4 = f"{RESULTS}/tab4"


localrules:
    tab4,


rule tab4_table:
    input:
        session=tab3_session,
        claims="results/paper/claims.yaml",
    output:
        multiext(f"{TAB4}/", "summary.csv", "compare.csv", "tab4.svg", "tab4.png"),
        table=f"{TAB4}/table.md",
    log:
        f"{TAB4}/logs/tab4-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.tab4 {input.session:q} --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule tab4:
    input:
        f"{TAB4}/table.md",
    log:
        f"{TAB4}/logs/tab4.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
