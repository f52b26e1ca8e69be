rule synthesise:
    output:
        directory("models/{tier}"),
    log:
        "models/logs/synth-{tier}.log",
    wildcard_constraints:
        tier="(unit|mini|shape)-(35b|8b)",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
    shell:
        "{params.python} -m edge0.cli synth {wildcards.tier} {output:q} --log {log:q}"


rule repack:
    input:
        # A measurement may leave the folder with a new time; a checkpoint does not change.
        ancient("models/{tier}"),
    output:
        directory("models/{tier}-records"),
    log:
        "models/logs/repack-{tier}.log",
    wildcard_constraints:
        tier="(unit|mini|shape)-(35b|8b)",
    conda:
        "../envs/harness.yaml"
    resources:
        measuring=1,  # a measurement beside it would be disturbed
    params:
        python=sys.executable,
    shell:
        "{params.python} -m edge0.cli repack {input:q} {output:q} > {log:q}"
