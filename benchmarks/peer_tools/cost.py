"""Run a command, and write what it took: `python cost.py RESULT.json COMMAND…`.

A process of its own, with next to no memory: a child begins with the peak of the process that forks
it, and a benchmark that has torch imported would lend each tool its own half gigabyte.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

process = subprocess.Popen(sys.argv[2:])
# Of this process and those that it waited for.
_, status, used = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
cost = [used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]
Path(sys.argv[1]).write_text(json.dumps(cost))
sys.exit(process.returncode)
