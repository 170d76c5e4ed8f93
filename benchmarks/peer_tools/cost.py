"""Run a command, and write what it took: `python cost.py RESULT.json COMMAND…`.

A process of its own, with next to no memory: a child begins with the peak of the process that forks
it, and a benchmark that has torch imported would lend each tool its own half gigabyte.
"""

import json
import os
import subprocess
import sys

process = subprocess.Popen(sys.argv[2:])
# Of this process and those that it waited for.
_, status, used = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
with open(sys.argv[1], "w") as file:
    json.dump([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024], file)
sys.exit(process.returncode)
