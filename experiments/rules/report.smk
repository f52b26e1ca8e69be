# The report: one HTML file and the machine's README, of what is on disk. It measures nothing.
import time

from experiments.reporting import captions, heading, labels, same_configuration

REPORT = f"{OURS}/report"


localrules:
    report,


rule report_pages:
    output:
        report(
            directory(f"{REPORT}/pages"),
            patterns=["{tier}/{target}/{file}"],
            caption="../report/page.rst",
            category=heading,
            subcategory="{tier}",
            labels=labels,
        ),
    log:
        f"{OURS}/logs/report-pages.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        results=subpath(output[0], ancestor=2),
        folder="experiments/report",
        captions=captions("experiments/report"),  # for page.rst
        started=int(time.time()),  # what is on disk is no input: it would be made first, and a report must not measure
    shell:
        "{params.python} -m analysis.pages {params.results:q} --captions {params.folder:q}"
        " --out {output:q} > {log:q}"


rule report:
    input:
        pages=rules.report_pages.output,
    output:
        html=f"{OURS}/report.html",
        readme=f"{OURS}/README.md",
    log:
        f"{OURS}/logs/report.log",
    conda:
        "../envs/harness.yaml"
    params:
        python=sys.executable,
        results=subpath(output.html, parent=True),
        configuration=lambda wildcards: same_configuration(config),
    shell:
        "{params.python} -m analysis.results_readme {params.results:q} > {log:q} &&"
        " {params.python} -m snakemake --nolock --report {output.html:q} {input.pages:q}"
        " --config {params.configuration:q} >> {log:q} 2>&1 ||"
        " {{ cat {log:q} >&2; exit 1; }}; echo {output.html:q} {output.readme:q}"
