"""What an admin should know of a command line before confirming it.

Pure. Advice beside the exact argv, never a refusal: a clever argv can always hide its meaning, so
the gate is the admin's confirmation of every word, and this only helps to read it.
"""

import re
from collections.abc import Sequence

from toolcrib.lib.text import escape_ambiguous

_SHELLS = frozenset([
    "sh", "bash", "zsh", "dash", "ash", "ksh", "fish", "csh", "tcsh", "busybox",
    "cmd", "powershell", "pwsh",
])  # fmt: skip
_RAISERS = frozenset(["sudo", "doas", "su", "pkexec", "runuser"])
_CONTAINERS = frozenset(["docker", "podman", "nerdctl"])
_HOST_PATH = re.compile(r"^(?:/|~|\.|\$|[A-Za-z]:[\\/])")
_WRAPPERS = frozenset(["env", "sudo", "doas", "nohup", "nice", "setsid", "stdbuf"])

# Program -> the options after which code stands on the command line.
_INLINE = {
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
_SHELL_INLINE = re.compile(r"^(?:-[A-Za-z]*c|--command|/[cCkK]|-[eE]nc|-[cC]ommand)")
_TAKES_A_VALUE = frozenset([
    "-W", "-X", "-r", "--require", "--import", "--loader", "-I", "-M", "-C", "--call", "-c",
])  # fmt: skip

# Runners that fetch a package by name: the words before it, and the options that take a value.
_RUNNERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("npx",), "npm"),
    (("bunx",), "npm"),
    (("pnpx",), "npm"),
    (("npm", "exec"), "npm"),
    (("npm", "x"), "npm"),
    (("pnpm", "dlx"), "npm"),
    (("yarn", "dlx"), "npm"),
    (("bun", "x"), "npm"),
    (("uvx",), "python"),
    (("uv", "tool", "run"), "python"),
    (("pipx", "run"), "python"),
)
_NAMES_A_PACKAGE = frozenset(["-p", "--package", "--from", "--spec"])
_RUNNER_VALUES = _NAMES_A_PACKAGE | frozenset([
    "--with", "--with-editable", "--python", "--index", "--index-url", "--extra-index-url",
    "--default-index", "--find-links", "--registry", "--prefix", "--cache", "-c", "--call",
])  # fmt: skip
_NPM_PIN = re.compile(r"^.+@[=v]?\d+(?:\.\d+){2}")
_PYTHON_PIN = re.compile(r"(?:===?|@)\s*v?\d+\.\d+|^git\+.*@[0-9a-f]{7,40}$")
_COMMIT = re.compile(r"#[0-9a-f]{7,40}$")


def argv_warnings(argv: Sequence[str]) -> list[str]:
    """Say in sentences what is risky in this command line, most serious first."""
    if not argv:
        return []
    warnings: list[str] = []
    command = argv[0]
    if "/" in command and not command.startswith("/"):
        warnings.append(
            "The program's path is relative, so the working folder decides what runs. "
            "Write its full path."
        )
    if " " in command.strip():
        warnings.append(
            "The program's name holds a space. If these are arguments, give each one on its own."
        )
    for words in _unwrapped(list(argv)):
        for warning in _of_program(_program(words[0]), words[1:]):
            if warning not in warnings:
                warnings.append(warning)
    return warnings


def _program(word: str) -> str:
    name = re.split(r"[/\\]", word)[-1].lower()
    return re.sub(r"\.(?:exe|cmd|bat|ps1)$", "", name)


def _unwrapped(words: list[str]) -> list[list[str]]:
    """List this command line and those that it starts, as far as that can be read."""
    found = [words]
    for _ in range(4):
        program = _program(words[0])
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
        found.append(words)
    return found


def _of_program(program: str, args: list[str]) -> list[str]:
    warnings = []
    if program in _RAISERS:
        warnings.append(f"{program} runs the program with another user's rights, often all.")
    if program in _SHELLS:
        if any(_SHELL_INLINE.match(arg) for arg in args):
            warnings.append(f"Runs code written in the arguments ({program}). Read all of it.")
        else:
            warnings.append(f"Starts a shell ({program}), which can run any other program.")
    elif _runs_inline_code(program, args):
        warnings.append(f"Runs code written in the arguments ({program}). Read all of it.")
    if package := _unpinned_package(program, args):
        package = escape_ambiguous(package[:100])
        warnings.append(
            f"Fetches {package} without a fixed version, so what runs can change at any start. "
            "Name an exact version."
        )
    if program in _CONTAINERS and "run" in args:
        warnings += _of_container(args)
    return warnings


def runs_inline_code(argv: Sequence[str]) -> bool:
    """Whether a program is told what to do in its arguments, also behind env or sudo."""
    return any("code written in the arguments" in warning for warning in argv_warnings(argv))


def _runs_inline_code(program: str, args: list[str]) -> bool:
    family = re.sub(r"[\d.]+w?$", "", program)
    inline = _INLINE.get("node" if family == "nodejs" else family)
    if inline is None:
        return False
    taken = False
    for arg in args:
        if inline.match(arg):
            return True
        if not taken and not arg.startswith("-"):
            return False  # a script's name: what follows are the script's own arguments
        taken = arg in _TAKES_A_VALUE
    return False


def _unpinned_package(program: str, args: list[str]) -> str:
    words = [program, *args]
    for start, kind in _RUNNERS:
        if tuple(words[: len(start)]) == start:
            package = _package(words[len(start) :])
            pinned = _NPM_PIN.match(package) if kind == "npm" else _PYTHON_PIN.search(package)
            local = package.startswith((".", "/", "~"))
            if package and not pinned and not local and not _COMMIT.search(package):
                return package
    return ""


def _package(args: list[str]) -> str:
    """Find the package a runner is told to fetch, or an empty text."""
    position = 0
    while position < len(args):
        arg = args[position]
        name, equals, value = arg.partition("=")
        if name in _NAMES_A_PACKAGE:
            return value if equals else "".join(args[position + 1 : position + 2])
        if not arg.startswith("-"):
            return arg
        position += 2 if arg in _RUNNER_VALUES else 1
    return ""


def _of_container(args: list[str]) -> list[str]:
    warnings = []
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = arg.partition("=")
        value = value if equals else following
        if name.startswith("-v") and len(name) > 2:
            name, value = "-v", arg[2:]
        mounts = (name in ("-v", "--volume") and _HOST_PATH.match(value)) or (
            name == "--mount" and "type=bind" in value
        )
        if mounts:
            warnings.append("Gives the container a folder of this machine. Check which, and how.")
        if name == "--privileged":
            warnings.append("--privileged gives the container this machine's own rights.")
        if name in ("--network", "--net", "--pid", "--ipc") and value == "host":
            warnings.append(f"{name} host lets the container share this machine's own.")
    return warnings
