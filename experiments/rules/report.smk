# The report: one HTML file and the machine's README, of what is on disk. It measures nothing.
import time

from experiments.reporting import heading, reportable, same_configuration

REPORT = f"results/{MACHINE}/report"


localrules:
    report,


rule report_pages:
    output:
        report(
            directory(f"{REPORT}/pages"),
            patterns=["{tier}/{target}.html"],
            caption="../report/page.rst",
            category=heading,
            labels={"what": "table", "of": "{tier}"},
        ),
    log:
        f"results/{MACHINE}/logs/report-pages.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        results=subpath(output[0], ancestor=2),
        captions="experiments/report",
        started=int(time.time()),  # what is on disk is no input: it would be made first, and a report must not measure
    shell:
        "{params.python} -m analysis.pages {params.results:q} --captions {params.captions:q}"
        " --out {output:q} > {log:q}"


rule report:
    input:
        pages=rules.report_pages.output,
    output:
        html=f"results/{MACHINE}/report.html",
        readme=f"results/{MACHINE}/README.md",
    log:
        f"results/{MACHINE}/logs/report.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        results=subpath(output.html, parent=True),
        targets=lambda wildcards: reportable(workflow.rules),
        configuration=lambda wildcards: same_configuration(config),
    shell:
        "{params.python} -m analysis.results_readme {params.results:q} > {log:q} &&"
        " {params.python} -m snakemake --nolock --report {output.html:q} {input.pages:q} {params.targets:q}"
        " --config {params.configuration:q} >> {log:q} 2>&1 &&"
        " echo {output.html:q} {output.readme:q}"
