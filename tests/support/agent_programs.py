"""Agent programs that people use, as their snippets configure them, with a scripted model.

Each function writes the configuration into a folder, which is the program's home, and returns the
command and the variables of a run with one prompt.
"""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sessions_app.agents.snippets import for_agent
from tests.support import parts
from tests.support.installation import clean_environment
from tests.support.scripted_models import ScriptedProvider
from tests.support.waiting import scaled

PROMPT = "Use a tool: convert a temperature"
CODEX_MODEL = """\
model = "scripted"
model_provider = "scripted"

[model_providers.scripted]
name = "scripted"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

"""
SEES_IMAGES = {"input": ["text", "image"], "output": ["text"]}
CODEX_PERMISSION = 'default_tools_approval_mode = "approve"'
NO_TRAFFIC = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}


class Run(NamedTuple):
    argv: Sequence[str]
    variables: Mapping[str, str]


class Home(NamedTuple):
    """Where a program runs, and what it is to use."""

    folder: Path
    url: str
    key: str
    model: ScriptedProvider
    prompt: str = PROMPT

    def snippet(self, title: str) -> str:
        return next(item for item in for_agent(self.url, self.key) if item.title == title).text

    def variables(self, extra: Mapping[str, str]) -> dict[str, str]:
        node = str(Path(parts.node()).parent)
        own = {
            "HOME": str(self.folder),
            "PWD": str(self.folder),
            "PATH": f"{node}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "NO_COLOR": "1",
            "ANTHROPIC_BASE_URL": self.model.url,
            "ANTHROPIC_API_KEY": "x",
            "OPENAI_BASE_URL": self.model.url,
            "OPENAI_API_KEY": "x",
            **NO_TRAFFIC,
            **extra,
        }
        return clean_environment(own) | {"PATH": own["PATH"]}

    def run(self, run: Run) -> str:
        """Run a command to its end; return its output."""
        done = subprocess.run(
            run.argv,
            env=self.variables(run.variables),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(150),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def start(self, run: Run) -> "subprocess.Popen[bytes]":
        """Start a command in a process group of its own, for `interrupt`."""
        with (self.folder / "agent.log").open("wb") as log:
            return subprocess.Popen(
                run.argv,
                env=self.variables(run.variables),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def interrupt(process: "subprocess.Popen[bytes]", number: int = signal.SIGINT) -> None:
    """End a program and whatever it has started, as Ctrl+C does."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, number)
    try:
        process.wait(scaled(10))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_add_command(home: Home, title: str, program: str) -> None:
    """Run the command of a snippet that registers Toolcrib."""
    words = shlex.split(home.snippet(title).replace("\\\n", ""))
    home.run(Run([program, *words[1:]], {}))


def claude_code(home: Home) -> Run:
    program = parts.npm_program("npm-agents", "@anthropic-ai/claude-code")
    run_add_command(home, "Claude Code", program)
    options = ("--allowedTools", "mcp__toolcrib", "--model", "scripted")
    return Run([program, "-p", *options, home.prompt], {})


def codex(home: Home, permission: str = CODEX_PERMISSION) -> Run:
    text = CODEX_MODEL.format(url=home.model.url) + home.snippet("Codex CLI") + permission + "\n"
    (home.folder / "config.toml").write_text(text)
    program = parts.npm_program("npm-agents", "@openai/codex")
    argv = [program, "exec", "--skip-git-repo-check", home.prompt]
    return Run(argv, {"CODEX_HOME": str(home.folder)})


def gemini(home: Home) -> Run:
    program = parts.npm_program("gemini", "@google/gemini-cli")
    run_add_command(home, "Gemini CLI", program)
    settings = home.folder / ".gemini" / "settings.json"
    values = json.loads(settings.read_text())
    values |= {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    values |= {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    settings.write_text(json.dumps(values))
    variables = {"GEMINI_API_KEY": "x", "GOOGLE_GEMINI_BASE_URL": home.model.url}
    argv = [program, "--yolo", "--skip-trust", "--model", "gemini-scripted", "--prompt"]
    return Run([*argv, home.prompt], variables)


def opencode(home: Home) -> Run:
    model = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "scripted",
        "options": {"baseURL": home.model.url, "apiKey": "x"},
        "models": {"scripted": {"attachment": True, "modalities": SEES_IMAGES}},
    }
    values = json.loads(home.snippet("opencode")) | {"provider": {"scripted": model}}
    (home.folder / "opencode.json").write_text(json.dumps(values))
    program = parts.npm_program("opencode", "opencode-ai")
    return Run([program, "run", "--model", "scripted/scripted", home.prompt], {})


def copilot(home: Home) -> Run:
    folder = home.folder / ".copilot"
    folder.mkdir()
    (folder / "mcp-config.json").write_text(home.snippet("Copilot CLI"))
    program = parts.npm_program("copilot", "@github/copilot")
    variables = {
        "COPILOT_PROVIDER_BASE_URL": home.model.url,
        "COPILOT_PROVIDER_API_KEY": "x",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_MODEL": "scripted",
        "COPILOT_OFFLINE": "true",
    }
    argv = [program, "--allow-all-tools", "--no-color", "--no-auto-update", "--prompt", home.prompt]
    return Run(argv, variables)


AGENTS: dict[str, Callable[[Home], Run]] = {
    "Claude Code": claude_code,
    "Codex CLI": codex,
    "Gemini CLI": gemini,
    "opencode": opencode,
    "Copilot CLI": copilot,
}
