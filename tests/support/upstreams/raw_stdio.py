"""JSON-RPC over stdio by hand: a server that can do everything wrong. No SDK needed.

python -m tests.support.upstreams.raw_stdio [--do WHAT] [--at start|list] [--tools-file FILE]
    [--era legacy|modern] [--note FILE]

It answers properly, except that at the given moment it does WHAT. --note is a file it writes
pids and the like into, one per line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.upstreams.answers import answer, large_notice, listing

IDLE = (
    "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(600)"
)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def note(path: str | None, text: object) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(f"{text}\n")


def misbehave(what: str, path: str | None) -> None:
    """Do it. Returns where the server then goes on as if nothing had happened."""
    if what == "banner":
        for _ in range(3):
            say("Welcome to the raw server! Ready.")
    elif what == "many_banners":
        for number in range(200):
            say(f"log line {number}")
    elif what == "stderr_flood":
        for number in range(20_000):
            sys.stderr.write(f"noise {number} " + "x" * 100 + "\n")
        sys.stderr.write("the last line\x1b[31m\x07\n")
        sys.stderr.flush()
    elif what == "close_stdout":
        os.close(1)
        sleep_for_ever()
    elif what == "exit_zero":
        sys.exit(0)
    elif what == "crash":
        sys.stderr.write("Traceback: no API key\x1b[0m given\n")
        sys.exit(3)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "hang":
        sleep_for_ever()
    elif what == "endless_line":
        while True:
            sys.stdout.write("x" * 65536)
    elif what == "large_notice":
        say(json.dumps(large_notice()))
    elif what == "empty_lines":
        sys.stdout.write("\n" * 128 * 1024)
        sys.stdout.flush()
    elif what == "ignore_term":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    elif what == "spawn_grandchild":
        # In a session of its own, deaf to signals, holding stdout: only a supervisor ends it.
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
    parser.add_argument("--stay", action="store_true", help="do not leave when stdin ends")
    parser.add_argument("--secret", help="an argument that means nothing")
    options = parser.parse_args()
    tools = listing(options.tools_file)
    note(options.note, os.getpid())

    if options.at == "start":
        for what in options.do:
            misbehave(what, options.note)
    for line in sys.stdin:
        message = json.loads(line)
        if options.at == "list" and message.get("method") == "tools/list":
            for what in options.do:
                misbehave(what, options.note)
        reply = answer(message, tools, options.era)
        if reply is not None:
            say(reply.replace("\n", " "))
    if options.stay:
        sleep_for_ever()


if __name__ == "__main__":
    main()
