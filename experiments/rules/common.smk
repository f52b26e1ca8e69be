# The checked configuration, and the places that all rules share.
import sys
import time
from pathlib import Path

from edge0.errors import EXIT_CODE, Edge0Error
from edge0.telemetry.host import machine_id
from experiments.config import Workflow

try:
    WORKFLOW = Workflow.of(config)
except Edge0Error as error:
    print(f"edge0: {error}", file=sys.stderr)
    sys.exit(EXIT_CODE)

MACHINE = WORKFLOW.values.get("machine") or machine_id()
RESULTS = f"results/{MACHINE}/{WORKFLOW.name}"
# What was asked for is measured anew: the parameters of what measures carry the time, unless remeasure=false.
STARTED = int(time.time()) if WORKFLOW.values.get("remeasure", True) else 0


def asked(folder, *targets):
    """Whether this call of Snakemake names one of these targets, one of their rules, or a file of their folder (given with its slash)."""
    settings = workflow.dag_settings  # known to input functions, not before
    named = settings.targets or ([] if settings.target_jobs else ["tab3"])
    return any(
        str(name).startswith((*(f"{target}_" for target in targets), folder))
        or name in targets
        for name in named
    )


def measured(sessions, document, *targets):
    """What a table is made of: `document` of the newest finished folder below `sessions`.

    Where there is none, or one of `targets` is asked for (and remeasure is not false), it is latest.json instead: the
    output of the rule that measures. So a table that only reads another target's rows does not measure them again, but
    in one call with that target it waits for the new ones. For input functions alone.
    """
    finished = sorted(Path(sessions).glob(f"[!.]*/{document}"))
    if finished and not (
        STARTED and asked(sessions.partition("sessions")[0], *targets)
    ):
        return str(finished[-1])
    return f"{sessions}/latest.json"


def tab3_session(wildcards):
    """Table 3's session, for the tables that are made of it."""
    return measured(f"{RESULTS}/tab3/sessions", "session.json", "tab3")


def tab3_session_if_any(wildcards):
    """The same where there is one, or Table 3 is asked for in this call: for tables that it stands beside."""
    finished = any(Path(RESULTS).glob("tab3/sessions/[!.]*/session.json"))
    return (
        tab3_session(wildcards) if finished or asked(f"{RESULTS}/tab3/", "tab3") else []
    )
