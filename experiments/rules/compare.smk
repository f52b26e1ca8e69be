# One table and one figure of Table 3 on several machines; reads what is there, measures nothing.
COMPARED = [
    name.strip() for name in config.get("machines", "").split(",") if name.strip()
] or [
    MACHINE,
    "m2-16gb",
    "m4pro-24gb",
]
COMPARISON = f"{WORKFLOW.values['results']}/compare/{'+'.join(COMPARED)}"


# The tables that are there, with their times: a newer one makes the comparison anew. Not inputs, because those of this
# machine would be made first, and a comparison must not measure.
COMPARED_TABLES = sorted(
    f"{path} {path.stat().st_mtime_ns}"
    for name in COMPARED
    for table in ("tab3/summary.csv", "tab3/pairs.csv", "fit/summary.csv")
    for path in Path(WORKFLOW.values["results"], name).glob(f"*/{table}")
)


localrules:
    compare,


rule compare_table:
    input:
        sorted(
            str(path)
            for name in COMPARED
            for path in Path("experiments/machines").glob(f"{name}.yaml")
        ),
        claims="results/paper/claims.yaml",
    output:
        # `update`: what is there stays where a comparison fails.
        update(
            multiext(
                f"{COMPARISON}/",
                "compare.png",
                "compare.svg",
            )
        ),
        table=update(f"{COMPARISON}/table.md"),
        rows=update(f"{COMPARISON}/rows.csv"),
    log:
        f"{COMPARISON}/logs/compare-table.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        machines=COMPARED,
        here=MACHINE,
        results=subpath(output.table, ancestor=3),
        tables=COMPARED_TABLES,
        out=subpath(output.table, parent=True),
    shell:
        "{params.python} -m analysis.compare {params.machines:q} --here {params.here:q} --results {params.results:q}"
        " --claims {input.claims:q} --out {params.out:q} > {log:q}"


rule compare:
    input:
        f"{COMPARISON}/table.md",
    log:
        f"{COMPARISON}/logs/compare.log",
    conda:
        "../envs/harness.yaml"
    shell:
        "cat {input:q} | tee {log:q}"
