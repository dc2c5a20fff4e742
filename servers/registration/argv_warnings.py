"""Security warnings about a stdio command line, shown before an admin confirms it.

Pure. Warnings never reject a command: an argv can always hide its meaning, so authorization
depends on the admin's confirmation of the exact argv. The warnings only help to read it.
"""

import re
from collections.abc import Iterator, Sequence

from toolcrib.lib.text import escape_ambiguous

SHELLS = frozenset([
    "sh", "bash", "zsh", "dash", "ash", "ksh", "fish", "csh", "tcsh", "busybox",
    "cmd", "powershell", "pwsh",
])  # fmt: skip
_PRIVILEGE_TOOLS = frozenset(["sudo", "doas", "su", "pkexec", "runuser"])
CONTAINERS = frozenset(["docker", "podman", "nerdctl"])
_HOST_PATH = re.compile(r"^(?:/|~|\.|\$|[A-Za-z]:[\\/])")
_WRAPPERS = frozenset(["env", "sudo", "doas", "nohup", "nice", "setsid", "stdbuf"])

# Program -> the options that take inline code.
_INLINE_OPTIONS = {
    "python": re.compile(r"^-[A-Za-z]*c"),
    "pypy": re.compile(r"^-[A-Za-z]*c"),
    "node": re.compile(r"^(?:-[pe]+\b|--eval|--print|-e|-p)"),
    "bun": re.compile(r"^(?:-[pe]|--eval|--print)"),
    "deno": re.compile(r"^eval$"),
    "ruby": re.compile(r"^-[A-Za-z]*e"),
    "perl": re.compile(r"^-[A-Za-z]*[eE]"),
    "php": re.compile(r"^(?:-r|-R|--run)"),
    "lua": re.compile(r"^-e"),
    "osascript": re.compile(r"^-e"),
    "npx": re.compile(r"^(?:-c|--call)"),
}
_SHELL_INLINE_OPTIONS = re.compile(r"^(?:-[A-Za-z]*c|--command|/[cCkK]|-[eE]nc|-[cC]ommand)")
_OPTIONS_WITH_VALUE = frozenset([
    "-W", "-X", "-r", "--require", "--import", "--loader", "-I", "-M", "-C", "--call", "-c",
])  # fmt: skip

# Commands that download a package by name -> the package ecosystem.
RUNNERS = {
    "npx": "npm", "bunx": "npm", "pnpx": "npm", "npm exec": "npm", "npm x": "npm",
    "pnpm dlx": "npm", "yarn dlx": "npm", "bun x": "npm",
    "uvx": "python", "uv tool run": "python", "pipx run": "python",
}  # fmt: skip
_PACKAGE_OPTIONS = frozenset(["-p", "--package", "--from", "--spec"])
_RUNNER_OPTIONS_WITH_VALUE = _PACKAGE_OPTIONS | frozenset([
    "--with", "--with-editable", "--python", "--index", "--index-url", "--extra-index-url",
    "--default-index", "--find-links", "--registry", "--prefix", "--cache", "-c", "--call",
])  # fmt: skip
_NPM_PIN = re.compile(r"^.+@[=v]?\d+(?:\.\d+){2}")
_PYTHON_PIN = re.compile(r"(?:===?|@)\s*v?\d+\.\d+|^git\+.*@[0-9a-f]{7,40}$")
_COMMIT = re.compile(r"#[0-9a-f]{7,40}$")


def argv_warnings(argv: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_warnings(argv))) if argv else []


def _warnings(argv: Sequence[str]) -> Iterator[str]:
    command = argv[0]
    if "/" in command and not command.startswith("/"):
        yield (
            "The command is a relative path, so the working directory decides what runs. "
            "Use an absolute path."
        )
    if " " in command.strip():
        yield "The command contains a space. If it includes arguments, enter each one separately."
    for words in _unwrap(list(argv)):
        yield from _program_warnings(program_name(words[0]), words[1:])


def program_name(word: str) -> str:
    name = re.split(r"[/\\]", word)[-1].lower()
    return re.sub(r"\.(?:exe|cmd|bat|ps1)$", "", name)


def _unwrap(words: list[str]) -> list[list[str]]:
    """Return this command line and those it starts through wrappers such as env and sudo."""
    commands = [words]
    for _ in range(4):
        program = program_name(words[0])
        rest = words[1:]
        if program in _WRAPPERS:
            while rest and (rest[0].startswith("-") or "=" in rest[0]):
                rest = rest[1:]
        elif program == "cmd" and rest and rest[0].lower() in ("/c", "/k"):
            rest = rest[1:]
        else:
            break
        if not rest:
            break
        words = rest
        commands.append(words)
    return commands


def _program_warnings(program: str, args: list[str]) -> Iterator[str]:
    if program in _PRIVILEGE_TOOLS:
        yield f"{program} runs the command as another user, usually root."
    if _has_inline_code(program, args):
        yield f"Runs inline code from the arguments ({program}). Review all of it."
    elif program in SHELLS:
        yield f"Starts a shell ({program}), which can run any command."
    if package := _unpinned_package(program, args):
        yield (
            f"Downloads {escape_ambiguous(package[:100])} without a pinned version, so the code "
            "can change at any start. Pin an exact version."
        )
    if program in CONTAINERS and "run" in args:
        yield from _container_warnings(args)


def runs_inline_code(argv: Sequence[str]) -> bool:
    """Return whether the arguments contain inline code, also behind env or sudo."""
    commands = _unwrap(list(argv))
    return any(_has_inline_code(program_name(words[0]), words[1:]) for words in commands)


def _has_inline_code(program: str, args: list[str]) -> bool:
    if program in SHELLS:
        return any(_SHELL_INLINE_OPTIONS.match(arg) for arg in args)
    family = re.sub(r"[\d.]+w?$", "", program)
    inline = _INLINE_OPTIONS.get("node" if family == "nodejs" else family)
    if inline is None:
        return False
    is_value = False
    for arg in args:
        if inline.match(arg):
            return True
        if not is_value and not arg.startswith("-"):
            return False  # a script: the arguments after it are its own
        is_value = arg in _OPTIONS_WITH_VALUE
    return False


def _unpinned_package(program: str, args: list[str]) -> str:
    words = [program, *args]
    for runner, kind in RUNNERS.items():
        size = len(runner.split())
        if words[:size] == runner.split():
            package = _package_name(words[size:])
            pinned = _NPM_PIN.match(package) if kind == "npm" else _PYTHON_PIN.search(package)
            local = package.startswith((".", "/", "~"))
            if package and not pinned and not local and not _COMMIT.search(package):
                return package
    return ""


def _package_name(args: list[str]) -> str:
    """Return the package that a runner downloads, or an empty string."""
    position = 0
    while position < len(args):
        arg = args[position]
        name, equals, value = arg.partition("=")
        if name in _PACKAGE_OPTIONS:
            return value if equals else "".join(args[position + 1 : position + 2])
        if not arg.startswith("-"):
            return arg
        position += 2 if arg in _RUNNER_OPTIONS_WITH_VALUE else 1
    return ""


def _container_warnings(args: list[str]) -> Iterator[str]:
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = arg.partition("=")
        value = value if equals else following
        if name.startswith("-v") and len(name) > 2:
            name, value = "-v", arg[2:]
        mounts = (name in ("-v", "--volume") and _HOST_PATH.match(value)) or (
            name == "--mount" and "type=bind" in value
        )
        if mounts:
            yield "Mounts a directory of this machine into the container. Check the path and mode."
        if name == "--privileged":
            yield "--privileged gives the container root access to this machine."
        if name in ("--network", "--net", "--pid", "--ipc") and value == "host":
            yield (
                f"{name} host shares this machine's {name.strip('-')} namespace with the container."
            )
