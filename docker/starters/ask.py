"""Ask the process behind a SuperExec for a fork: ``ask.py COMMAND ARGUMENTS``.

This process ends when the fork has begun. It starts in 10 ms, because Python runs
without site-packages. If there is no fork, this process becomes Flower's own command.
"""

import json
import os
import socket
import sys

try:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(os.environ["SUPEREXEC_DOOR"])
        line.send(json.dumps(sys.argv[1:]).encode())
        begun = line.recv(1)
except OSError:
    begun = b""
if not begun:
    command = os.path.join(os.environ["SUPEREXEC_BIN"], sys.argv[1])
    os.execv(command, [command, *sys.argv[2:]])
