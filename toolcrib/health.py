"""Container health check: `python -m toolcrib.health web|worker|beat|listener`.

`web` is checked over HTTP. Worker, beat and listener touch the file named by TOOLCRIB_HEARTBEAT
each time they do their work: hear from the broker, send a due task, read the list of servers.
Imports no Django, so a check takes milliseconds.
"""

import http.client
import os
import sys
import time

from toolcrib.lib.process_identity import heartbeat_file

MAX_AGE = 60.0  # seconds; the slowest process, beat, touches its file every 5


def web_problem() -> str:
    # Use the first allowed host name: other hosts are rejected, 127.0.0.1 included.
    hosts = [host.strip() for host in os.environ.get("TOOLCRIB_HOSTS", "").split(",")]
    port = int(os.environ.get("PORT") or 8000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/livez", headers={"Host": hosts[0] or "localhost"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"/livez does not respond: {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"/livez returns HTTP {status}"


def heartbeat_problem() -> str:
    path = heartbeat_file()
    if path is None:
        return "TOOLCRIB_HEARTBEAT is not set"
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return "no heartbeat yet"
    return "" if age < MAX_AGE else f"the last heartbeat was {age:.0f} s ago"


def main() -> int:
    checks = {"web": web_problem} | dict.fromkeys(("worker", "beat", "listener"), heartbeat_problem)
    if len(sys.argv) != 2 or sys.argv[1] not in checks:
        sys.stderr.write(f"Usage: python -m toolcrib.health {'|'.join(checks)}\n")
        return 2
    problem = checks[sys.argv[1]]()
    sys.stdout.write((problem or "ok") + "\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
