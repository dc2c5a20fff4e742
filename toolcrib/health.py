"""Is this process well? `python -m toolcrib.health NAME` is the health check of a container.

`web` is asked over HTTP. Worker, beat and listener touch a file, named by TOOLCRIB_HEARTBEAT,
each time they have done what they are there for: heard from the broker, sent a due task, read
the list of servers. Imports no Django, so that a check costs milliseconds.
"""

import http.client
import os
import sys
import time
from pathlib import Path

OLDEST = 60.0  # seconds; the slowest of them, beat, touches every 5


def touch() -> None:
    """Note that this process did its work just now, where somebody asked to know."""
    path = os.environ.get("TOOLCRIB_HEARTBEAT")
    if path:
        Path(path).touch(mode=0o600)


def web_problem() -> str:
    # The first host name we answer to: others are refused, 127.0.0.1 too.
    hosts = [host.strip() for host in os.environ.get("TOOLCRIB_HOSTS", "").split(",")]
    port = int(os.environ.get("PORT") or 8000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/livez", headers={"Host": hosts[0] or "localhost"})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"/livez does not answer: {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"/livez answers HTTP {status}"


def heartbeat_problem() -> str:
    path = os.environ.get("TOOLCRIB_HEARTBEAT")
    if not path:
        return "TOOLCRIB_HEARTBEAT is not set"
    try:
        age = time.time() - Path(path).stat().st_mtime
    except OSError:
        return "no heartbeat yet"
    return "" if age < OLDEST else f"the last heartbeat was {age:.0f} s ago"


def main() -> int:
    names = {"web": web_problem} | dict.fromkeys(("worker", "beat", "listener"), heartbeat_problem)
    if len(sys.argv) != 2 or sys.argv[1] not in names:
        sys.stderr.write(f"Name one of: {', '.join(names)}.\n")
        return 2
    problem = names[sys.argv[1]]()
    sys.stdout.write((problem or "ok") + "\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
