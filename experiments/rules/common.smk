# The checked configuration, and the places that all rules share.
import sys
import time
from contextlib import suppress
from pathlib import Path

from edge0.errors import EXIT_CODE, Edge0Error, ErrorKind
from edge0.telemetry.host import machine_id
from experiments.config import PLACE, Workflow
from experiments.host.machine_file import MACHINES, other_machine, this_machine


def refuse(error):
    """End this call of Snakemake with one line."""
    print(f"edge0: {error}", file=sys.stderr)
    sys.exit(EXIT_CODE)


try:
    WORKFLOW = Workflow.of(config)
except Edge0Error as error:
    refuse(error)

# A profile that counts `measuring` per node measures on other machines than the one that submits.
if (
    workflow.resource_settings.overwrite_resource_scopes.get("measuring") == "local"
    and WORKFLOW.values.get("machine") is None
):
    refuse(
        Edge0Error(
            ErrorKind.OPTION_INVALID,
            "what other nodes measure would stand under the name of this one",
            path=PLACE,
            tensor="machine",
            expected="the name of their folder of results",
            found="null",
            hint="add machine=NAME to --config",
        )
    )

MACHINE = WORKFLOW.values.get("machine") or machine_id()
if MACHINE == machine_id():
    with suppress(Edge0Error):  # a broken machine file is told by who reads it
        if told := other_machine(this_machine(), MACHINES):
            print(f"edge0: warning: {told}", file=sys.stderr)
OURS = f"{WORKFLOW.values['results']}/{MACHINE}"
RESULTS = f"{OURS}/{WORKFLOW.name}"
# The repacked copy of the checkpoint, "" where a checkpoint of one's own has none.
RECORDS = WORKFLOW.values.get("records") or (
    f"models/{WORKFLOW.name}-records" if WORKFLOW.synthesised else ""
)
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


def to_measure(model, sessions, document="session.json"):
    """The checkpoint that a rule measures into `sessions`, where a finished folder holds `document`.

    With remeasure=false and none finished the call ends here, before a checkpoint is made for it. For input functions
    alone.
    """
    if not STARTED and not any(Path(sessions).glob(f"[!.]*/{document}")):
        refuse(
            Edge0Error(
                ErrorKind.FILE_MISSING,
                "no raw rows of a finished measurement are here (git has the tables, not the rows)",
                path=sessions,
                expected=f"a finished folder with {document}",
                found="none",
                hint="leave out remeasure=false to measure it",
            )
        )
    # A checkpoint that was made again is no reason to measure: the time is, where remeasure is not false.
    return ancient(model)


def tab3_session(wildcards):
    """Table 3's session, for the tables that are made of it."""
    return measured(f"{RESULTS}/tab3/sessions", "session.json", "tab3")


def tab3_session_if_any(wildcards):
    """The same where there is one, or Table 3 is asked for in this call: for tables that it stands beside."""
    finished = any(Path(RESULTS).glob("tab3/sessions/[!.]*/session.json"))
    return (
        tab3_session(wildcards) if finished or asked(f"{RESULTS}/tab3/", "tab3") else []
    )
