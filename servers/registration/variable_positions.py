"""Positions of variables in a stdio command: which arguments may contain `${NAME}`.

Pure. A variable is a value whose text nobody sees, so it must not decide what runs. It may stand
after `--name=`, as the value after an option, or in the password, path or query of a URL; always in
an argument of the server program itself, behind the script or package that an interpreter, `npx` or
`docker run` starts. Commands that cannot be parsed with certainty must not contain variables.
"""

import re
import sys
from collections.abc import Sequence

from servers.registration.argv_warnings import CONTAINERS, RUNNERS, SHELLS, program_name
from servers.registration.validation import PLACEHOLDER, bad_argv, env_denial
from toolcrib.lib.errors import Invalid

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_OPTION_AND_VALUE = re.compile(r"(--?[A-Za-z][\w.-]*)=.*", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)
_URL_PASSWORD = re.compile(r"[A-Za-z][\w+.-]*://[^\s/?#@$]*:\$\{\w+\}@[^\s$]*")
_URL_AFTER_HOST = re.compile(r"[A-Za-z][\w+.-]*://(?:[^\s/?#@$]*(?:\$\{\w+\})?@)?[^\s/?#@$]+[/?].*")

# Programs that run other programs, or code, from their arguments in too many ways to parse.
_LAUNCHERS = frozenset([
    "awk", "gawk", "mawk", "nawk", "sed", "ed", "ex", "vi", "vim", "nvim", "emacs", "find",
    "fd", "xargs", "parallel", "timeout", "nice", "ionice", "chrt", "taskset", "nohup",
    "setsid", "stdbuf", "unbuffer", "script", "expect", "screen", "tmux", "watch", "time",
    "flock", "sudo", "doas", "su", "runuser", "pkexec", "chroot", "unshare", "nsenter",
    "setpriv", "capsh", "firejail", "bwrap", "systemd-run", "at", "crontab", "split", "sort",
    "strace", "ltrace", "gdb", "lldb", "valgrind", "perf", "ssh", "scp", "sftp", "rsync", "tar",
    "zip", "git", "make", "cmake", "ninja", "socat", "nc", "ncat", "netcat", "busybox",
    "toybox", "sqlite", "psql", "mysql", "gcc", "cc", "ld", "go", "cargo", "npm", "pnpm",
    "yarn", "pip", "uv", "pipx", "poetry", "pipenv", "pdm", "hatch", "rye", "conda", "mamba",
    "bundle", "gem", "composer", "mvn", "gradle", "ant", "kubectl", "oc", "helm", "osascript",
    "cmd", "powershell", "pwsh", "wscript", "cscript", "rundll", "dotnet", "swift", "dart",
    "kotlin", "scala", "docker-compose", "start-stop-daemon", "runcon", "numactl", "prlimit",
    "setarch", "proxychains", "torsocks", "dbus-run-session", "volta", "fnm", "nvm", "mise", "asdf",
    "direnv", "man", "tcpdump", "wget", "curl", "gpg", "ssh-keygen", "ssh-agent", "dpkg", "apt",
    "apt-get", "rpm", "dnf", "yum", "uvicorn", "gunicorn", "hypercorn", "flask", "celery", "pytest",
    "ipython", "jupyter", "osqueryi", "swipl", "m4", "jq", "ffmpeg", "gtester", "logrotate",
])  # fmt: skip
_LOADER = re.compile(r"ld(?:-[\w-]+)?\.so|ld-(?:linux|musl)")  # runs a program, with any library
# Interpreter -> the options that may precede its script; all others are not parsed.
_INTERPRETERS = {
    **dict.fromkeys(SHELLS - {"cmd", "powershell", "pwsh", "busybox"}, None),
    "python": re.compile(r"-[uBEIsSOqvbdP]+"),
    "pypy": re.compile(r"-[uBEIsSOqvbd]+"),
    "node": re.compile(
        r"--(?:enable-source-maps|no-warnings|no-deprecation|use-(?:system|openssl)-ca|"
        r"experimental-strip-types|max-old-space-size=\d+)"
    ),
    "deno": re.compile(r"-A|-q|--quiet|--no-prompt|--allow-(?:all|net|read|env|sys)(?:=.*)?"),
    "bun": None,
    "java": re.compile(r"-jar|-X(?:mx|ms)\w+"),
    **dict.fromkeys(
        ["ruby", "perl", "php", "lua", "luajit", "tclsh", "wish", "r", "rscript", "julia", "guile",
         "racket", "elixir", "erl", "escript", "groovy", "mono", "runghc", "ocaml", "clojure", "bb",
         "tsx", "ts-node", "jshell"],
    ),
}  # fmt: skip
_RUNNERS = [*RUNNERS, "poetry run", "pipenv run", "pdm run", "bundle exec", "pnpm exec"]
_RUNNER_FLAGS = re.compile(r"-y|--yes|-q|--quiet|--silent|--offline|--prefer-offline|--isolated|--")
_RUNNER_VALUES = frozenset(
    ["-p", "--package", "--from", "--with", "--python", "--spec", "--directory", "--project"]
)
_CONTAINER_FLAGS = re.compile(
    r"-[itd]+|--(?:rm|init|interactive|tty|detach|read-only|privileged|pull=\w+)"
)
_CONTAINER_VALUES = frozenset([
    "-e", "--env", "-v", "--volume", "--mount", "--name", "--network", "--net", "-p",
    "--publish", "-w", "--workdir", "-u", "--user", "-m", "--memory", "--cpus", "--platform",
    "--entrypoint", "-l", "--label", "--add-host", "--env-file", "--pull", "-h", "--hostname",
    "--cap-drop", "--cap-add", "--security-opt", "--restart", "--tmpfs", "--shm-size", "--gpus",
    "--ulimit",
])  # fmt: skip
# Options whose value many programs run or load as code.
_CODE_OPTIONS = frozenset([
    "c", "e", "x", "r", "m", "eval", "exec", "execute", "command", "cmd", "call", "run",
    "script", "shell", "code", "program", "entrypoint", "require", "import", "loader",
    "preload", "plugin", "hook", "init-command", "rsh", "to-command", "checkpoint-action",
    "use-compress-program", "interpreter", "exec-path", "command-line", "shell-command",
    "pre-command", "post-command", "pre-invoke", "post-invoke", "on-start", "startas", "wrapper",
    "init-file", "rcfile", "node-options", "node-args", "java-options", "javaagent", "agentlib",
    "agentpath", "classpath", "class-path", "cp", "library-path", "module-path", "pythonpath",
    "app-dir", "audit", "extension", "load-extension", "load-module", "hooks", "hooks-dir",
    "pager", "editor", "browser", "askpass", "use-askpass", "agent-program", "import-map",
])  # fmt: skip


class _Unparsed(Exception):
    """The command cannot be divided into launcher and server program."""


def find_misplaced_variables(argv: Sequence[str]) -> list[int]:
    """Return the positions of the arguments that contain a variable and must not."""
    argv = list(argv)
    used = [position for position, arg in enumerate(argv) if PLACEHOLDER.search(arg)]
    if not used:
        return []
    try:
        program, allowed = _find_program(argv, 0)
    except _Unparsed:
        return used
    return [
        position
        for position in used
        if position not in allowed
        and (position <= program or not _is_value(argv, program, position))
    ]


def misplaced_variable(arg: str) -> Invalid:
    name = PLACEHOLDER.findall(arg)[0]
    return bad_argv(
        f"The variable {name} stands where it could decide what runs.",
        hint="A variable may only be the value of an option, as in --token=${NAME}. Write this "
        "argument out in full, or pass the value in env.",
    )


def _find_program(argv: Sequence[str], at: int) -> tuple[int, set[int]]:
    """Return the position of the server program or script, and the values allowed before it."""
    # An option that the launcher's parser does not know may run code, as env -C folder -S words.
    if at >= len(argv) or PLACEHOLDER.search(argv[at]) or argv[at].startswith("-"):
        raise _Unparsed
    name = _family(argv[at])
    if name == "env":
        return _after_env(argv, at + 1)
    if name in CONTAINERS:
        return _find_image(argv, at + 1)
    words = [name, *argv[at + 1 :]]
    for runner in _RUNNERS:
        size = len(runner.split())
        if words[:size] == runner.split():
            return _find_program(argv, _skip(argv, at + size, _RUNNER_FLAGS, _RUNNER_VALUES))
    if name == "uv":  # uv --directory folder run program
        run = _skip(argv, at + 1, None, _RUNNER_VALUES)
        if argv[run] == "run":
            return _find_program(argv, _skip(argv, run + 1, _RUNNER_FLAGS, _RUNNER_VALUES))
    if name in _LAUNCHERS or _LOADER.match(name):
        raise _Unparsed
    if name in _INTERPRETERS:
        return _find_script(argv, at + 1, name), set()
    return at, set()


def _family(word: str) -> str:
    """Return a program's name without folder, ending, version number and package version."""
    name = re.sub(r"(?<=.)@.*$", "", program_name(word))
    name = re.sub(r"(?<=[a-z])[\d.]+w?$", "", name)
    return "node" if name == "nodejs" else name


def _skip(
    argv: Sequence[str], at: int, flags: re.Pattern[str] | None, values: frozenset[str]
) -> int:
    """Return the position of the first argument that is no option. Raises for unknown options."""
    while at < len(argv):
        arg = argv[at]
        if PLACEHOLDER.search(arg):
            raise _Unparsed
        if flags and flags.fullmatch(arg):
            at += 1
        elif arg in values:
            if at + 1 < len(argv) and PLACEHOLDER.search(argv[at + 1]):
                raise _Unparsed
            at += 2
        elif arg.startswith("-"):
            raise _Unparsed
        else:
            return at
    raise _Unparsed


def _find_script(argv: Sequence[str], at: int, name: str) -> int:
    flags = _INTERPRETERS[name]
    if name in ("deno", "bun"):
        if argv[at : at + 1] != ["run"]:
            raise _Unparsed
        at += 1
    while at < len(argv) and flags and flags.fullmatch(argv[at]):
        at += 1
    if name in ("python", "pypy") and argv[at : at + 1] == ["-m"]:
        at += 1
        module = "".join(argv[at : at + 1]).partition(".")[0]
        if module in sys.stdlib_module_names or _starts_programs(module):  # such as timeit and pip
            raise _Unparsed
    return _skip(argv, at, flags, frozenset(["-W", "-X"] if name == "python" else ()))


def _after_env(argv: Sequence[str], at: int) -> tuple[int, set[int]]:
    allowed = set()
    while at < len(argv) and (argv[at] == "-i" or _ASSIGNMENT.fullmatch(argv[at])):
        if _is_harmless_assignment(argv[at]):
            allowed.add(at)
        at += 1
    program, more = _find_program(argv, at)
    return program, allowed | more


def _find_image(argv: Sequence[str], at: int) -> tuple[int, set[int]]:
    """Return the position of the image of `docker run`; only `-e NAME=value` may be variable."""
    if argv[at : at + 1] == ["container"]:
        at += 1
    if argv[at : at + 1] != ["run"]:
        raise _Unparsed
    at += 1
    allowed = set()
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, value = argv[at].partition("=")
        if _CONTAINER_FLAGS.fullmatch(argv[at]):
            at += 1
            continue
        if name not in _CONTAINER_VALUES:
            raise _Unparsed
        value_at = at if equals else at + 1
        if name in ("-e", "--env"):
            assignment = value if equals else "".join(argv[value_at : value_at + 1])
            if _is_harmless_assignment(assignment):
                allowed.add(value_at)
        at = value_at + 1
    if at >= len(argv) or PLACEHOLDER.search(argv[at]):
        raise _Unparsed
    return at, allowed


def _is_harmless_assignment(text: str) -> bool:
    match = _ASSIGNMENT.fullmatch(text)
    return bool(match) and not env_denial(match[1])  # type: ignore[index]  # matched


def _is_value(argv: Sequence[str], program: int, position: int) -> bool:
    """Return whether the argument is the value of an option, or a URL with a fixed host."""
    between = argv[program + 1 : position]
    if any(_starts_programs(word) for word in between):
        return False
    arg, previous = argv[position], argv[position - 1]
    if match := _OPTION_AND_VALUE.fullmatch(arg):
        return _is_plain_option(match[1])
    if position - 1 > program and _OPTION.fullmatch(previous):
        return _is_plain_option(previous)
    return bool(_URL_PASSWORD.fullmatch(arg) or _URL_AFTER_HOST.fullmatch(arg))


def _is_plain_option(name: str) -> bool:
    return name.lstrip("-").lower().replace("_", "-") not in _CODE_OPTIONS


def _starts_programs(word: str) -> bool:
    name = _family(word)
    first_words = {runner.split()[0] for runner in _RUNNERS}
    if name in _LAUNCHERS | CONTAINERS | first_words | {"env"}:
        return True
    return name in _INTERPRETERS or bool(_LOADER.match(name))
