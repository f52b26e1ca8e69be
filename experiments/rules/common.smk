# The checked configuration, and the places that all rules share.
import sys
import time

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
# A session that was asked for is measured anew: its parameters carry the time, unless remeasure=false.
STARTED = int(time.time()) if WORKFLOW.values.get("remeasure", True) else 0
