"""Typed functions of many tools: do checkers accept them, and how long do they take to write?

    python bench/stubs.py [FOLDER] [--sample 100] [--json]

FOLDER has real definitions (bench/fleet.py); without one they are generated. Python stubs of all
tools are checked by mypy; the script engine checks calls of a sample with minimal arguments, server
by server. TypeScript declarations of all tools are checked by tsc or Deno, where one is installed.
What a checker complains about is printed. Times are CPU time, the fastest of three rounds.
"""

import argparse
import json
import keyword
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")

import django  # noqa: E402

django.setup()

from bench import fleet  # noqa: E402
from sessions_app.scripts import python_stubs, signatures, typescript_declarations  # noqa: E402
from sessions_app.scripts.tool_names import ToolNames  # noqa: E402
from tests.sessions_app.scripts.test_signatures import make_tool  # noqa: E402

MAX_STUB_MS = 0.2  # a tool, of one language
LANGUAGES = ("python", "typescript")
CHECKED_TOGETHER = 200  # tools of a server in one check of the engine, as of a script
MAX_PRINTED = 20  # failures of a checker
MAX_COMPLAINT = 1_000  # characters


def read_modules(folder):
    """Return the tools of each module by their names in scripts."""
    servers = fleet.read_folder(folder) if folder else fleet.generate_servers(33, 600)
    tools = [
        make_tool(
            tool["name"],
            tool["inputSchema"],
            tool.get("outputSchema"),
            server=slug,
            description=tool["description"],
        )
        for slug, listed in servers.items()
        for tool in listed
    ]
    modules = {name: [*found.values()] for name, found in ToolNames(tools).modules.items()}
    for listed in modules.values():
        for tool in listed:  # definitions are parsed when they are first needed, for every purpose
            assert tool.input_schema is not None
    return modules


def time_stubs(modules, language):
    """Return the milliseconds a tool."""
    tools = [tool for listed in modules.values() for tool in listed]
    rounds = []
    for _ in range(3):
        started = time.process_time()
        for tool in tools:
            signatures.signature(tool, language)
        rounds.append(time.process_time() - started)
    return min(rounds) / len(tools) * 1000


def run_checker(command, folder, **environment):
    """Run a checker in a folder; return the lines that it complains with."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return []
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if line.strip()] or [f"{command[0]} failed"]


def check_with_mypy(modules, folder):
    for name, tools in modules.items():
        stub = python_stubs.module_stub(tools, docs=True)
        (folder / f"{name}.pyi").write_text(stub)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file="]
    return run_checker([*command, "--no-error-summary", "."], folder)


def check_with_typescript(modules, folder):
    """Return the complaints of tsc or Deno about the declarations; None if neither is installed."""
    file = folder / "tools.ts"
    parts = [
        typescript_declarations.namespace(name, tools, docs=True) for name, tools in modules.items()
    ]
    file.write_text("\n".join([typescript_declarations.GLOBALS, *parts, "export {};\n"]))
    beside_python = str(Path(sys.executable).parent)
    if tsc := shutil.which("tsc"):
        return run_checker([tsc, "--noEmit", "--strict", "--target", "es2022", file.name], folder)
    if deno := shutil.which("deno") or shutil.which("deno", path=beside_python):
        command = [deno, "check", "--no-config", "--no-lock", file.name]
        return run_checker(command, folder, DENO_DIR=str(folder / "deno"))
    return None


def check_with_engine(modules, sample):
    """Return the complaints of the engine's checker about a sample; None without the engine."""
    try:
        import pydantic_monty as monty
    except ImportError:
        return None
    total, complaints = sum(map(len, modules.values())), []
    step, position, checked = max(1, total // sample), 0, 0
    with monty.Monty(max_processes=1) as pool:
        for name, tools in modules.items():
            chosen = [tool for at, tool in enumerate(tools, position) if at % step == 0]
            position += len(tools)
            checked += len(chosen)
            for start in range(0, len(chosen), CHECKED_TOGETHER):
                some = chosen[start : start + CHECKED_TOGETHER]
                if problem := check_module(monty, pool, name, some):
                    complaints.append(f"{name}: {problem}")
    return checked, complaints


def check_module(monty, pool, name, tools):
    """Return what the engine says about a script that calls every function of a module."""
    stub = python_stubs.module_stub(tools, docs=True)
    functions = {tool.function: print for tool in tools}
    options = {
        "external_modules": {name: monty.ExternalModule(functions, stubs=stub)},
        "type_check": True,
        "type_check_stubs": python_stubs.GLOBALS,
    }
    calls = "\n    ".join(call_text(tool) for tool in tools)  # checked, and not run
    names = "\n".join(tool.name for tool in tools)
    code = f"import {name}\n{names}\nasync def call() -> None:\n    {calls}\n1"
    try:
        with pool.checkout(**options) as session:
            session.feed_run(code)
    except monty.MontyError as error:
        return str(error)[:MAX_COMPLAINT]
    return ""


def call_text(tool):
    """Return a call with minimal arguments; a parameter that is no keyword is left out."""
    try:
        arguments = fleet.arguments_for(tool.input_schema)
    except (AttributeError, TypeError):  # a schema of which the bench cannot make arguments
        return "pass"
    words = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if name.isidentifier() and not keyword.iskeyword(name)
    ]
    return f"await {tool.name}({', '.join(words)})"


def measure(options):
    modules = read_modules(options.folder)
    report = {
        "tools": sum(map(len, modules.values())),
        "ms": {language: time_stubs(modules, language) for language in LANGUAGES},
        "checks": {},
    }
    with tempfile.TemporaryDirectory(prefix="toolcrib-bench-") as scratch:
        for checker, check in (("mypy", check_with_mypy), ("typescript", check_with_typescript)):
            folder = Path(scratch) / checker
            folder.mkdir()
            complaints = check(modules, folder)
            if complaints is not None:
                report["checks"][checker] = {"tools": report["tools"], "failures": complaints}
    if (found := check_with_engine(modules, options.sample)) is not None:
        report["checks"]["engine"] = {"tools": found[0], "failures": found[1]}
    return report


def mark(good):
    return "OK  " if good else "MISS"


def print_report(report):
    for language, milliseconds in report["ms"].items():
        print(
            f"{mark(milliseconds <= MAX_STUB_MS)} {language} stubs of {report['tools']:,} tools: "
            f"{milliseconds:.3f} ms a tool, limit {MAX_STUB_MS:g}"
        )
    for checker in ("mypy", "engine", "typescript"):
        row = report["checks"].get(checker)
        if row is None:
            print(f"     {checker} is not installed")
            continue
        failures = row["failures"]
        print(f"{mark(not failures)} {checker} checks {row['tools']:,} tools", end="")
        print(f"; {len(failures):,} complaints:" if failures else "")
        for line in failures[:MAX_PRINTED]:
            print(f"       {line}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="real definitions")
    parser.add_argument("--sample", type=int, default=100, help="tools that the engine checks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = measure(options)
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
