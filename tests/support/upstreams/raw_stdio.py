"""stdio server with selectable misbehaviour, without the SDK.

python -m tests.support.upstreams.raw_stdio [--do WHAT] [--at start|list] [--tools-file FILE]
    [--era legacy|modern] [--note FILE]

It responds correctly, except that at start or on tools/list it does WHAT. It writes pids and other
facts to the file of --note, one per line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.upstreams.answers import large_notification, respond, tool_list_json

IDLE = (
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(600)"
)


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def note(path: str | None, text: object) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(f"{text}\n")


def misbehave(what: str, path: str | None) -> None:
    """Do the selected action. Returns if the server continues normally afterwards."""
    if what == "banner":
        for _ in range(3):
            write_line("Welcome to the raw server! Ready.")
    elif what == "many_banners":
        for number in range(200):
            write_line(f"log line {number}")
    elif what == "stderr_flood":
        for number in range(20_000):
            sys.stderr.write(f"noise {number} " + "x" * 100 + "\n")
        sys.stderr.write("the last line\x1b[31m\x07\n")
        sys.stderr.flush()
    elif what == "close_stdout":
        os.close(1)
        sleep_forever()
    elif what == "exit_zero":
        sys.exit(0)
    elif what == "crash":
        sys.stderr.write("Traceback: no API key\x1b[0m given\n")
        sys.exit(3)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "hang":
        sleep_forever()
    elif what == "endless_line":
        while True:
            sys.stdout.write("x" * 65536)
    elif what == "large_notice":
        write_line(json.dumps(large_notification()))
    elif what == "empty_lines":
        sys.stdout.write("\n" * 128 * 1024)
        sys.stdout.flush()
    elif what == "ignore_term":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    elif what == "spawn_grandchild":
        # In its own session, ignoring signals, holding stdout: only a supervisor can end it.
        child = subprocess.Popen([sys.executable, "-c", IDLE], start_new_session=True)
        note(path, child.pid)
    elif what == "show_env":
        note(path, json.dumps({"env": dict(os.environ), "argv": sys.argv, "cwd": str(Path.cwd())}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--do", action="append", default=[])
    parser.add_argument("--at", choices=("start", "list"), default="start")
    parser.add_argument("--tools-file")
    parser.add_argument("--era", choices=("legacy", "modern", "unknown"), default="modern")
    parser.add_argument("--note")
    parser.add_argument("--stay", action="store_true", help="do not exit when stdin closes")
    parser.add_argument("--secret", help="an unused argument")
    options = parser.parse_args()
    tools = tool_list_json(options.tools_file)
    note(options.note, os.getpid())

    if options.at == "start":
        for what in options.do:
            misbehave(what, options.note)
    for line in sys.stdin:
        message = json.loads(line)
        if options.at == "list" and message.get("method") == "tools/list":
            for what in options.do:
                misbehave(what, options.note)
        reply = respond(message, tools, options.era)
        if reply is not None:
            write_line(reply.replace("\n", " "))
    if options.stay:
        sleep_forever()


if __name__ == "__main__":
    main()
