"""Validation of URLs, environment variables, headers and command lines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.registration.argv_warnings import argv_warnings
from servers.registration.validation import (
    argv_digest,
    check_argv,
    check_env,
    check_header,
    check_url,
    format_argv,
    url_warnings,
)
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous

PEM = "-----BEGIN PRIVATE KEY-----\nMIIBVQ==\nabc+/=\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file:/etc/passwd",
        "gopher://example.com/1",
        "ftp://example.com",
        "javascript:alert(1)",
        "//example.com/mcp",
        "example.com/mcp",
        "example.com:8000/mcp",
        "localhost:8000/mcp",
        "",
        "https://",
        "https:///mcp",
        "https:example.com",
        "https://:443/",
        "http://user:pw@example.com/",
        "https://token@example.com/",
        "https://example.com:0/",
        "https://example.com:22/",
        "https://example.com:6379/",
        "https://example.com:5432/",
        "https://example.com:27017/",
        "https://example.com:65536/",
        "https://example.com:http/",
        "https://example.com:-1/",
        "https://example.com./mcp",
        "https://example.com。/mcp",
        "https://example..com/",
        "https://example.com/%00",
        "https://example.com/a%0d%0aHost:evil",
        "https://exam%00ple.com/",
        "https://exam%70le.com/",
        "https://example.com/a b",
        "https://example.com/\nx",
        "https://exa\tmple.com/",
        "https://example.com/\x00",
        "https://example.com\\@evil.com/",
        "https://example.com/#part",
        "https://example.com/\u202egpj",
        "https://exam\u200bple.com/",
        "https://${HOST}/mcp",
        "https://example.com:${PORT}/mcp",
        "${SCHEME}://example.com/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "https://::1/",
        "https://" + "a" * 64 + ".com/",
        "https://example.com/" + "a" * 2000,
    ],
)
def test_an_invalid_or_hostile_url_is_rejected_with_a_hint(url):
    with pytest.raises(Invalid) as error:
        check_url(url, allow_http=True)

    assert error.value.code == "bad_url"
    assert error.value.status == 422
    assert error.value.message.endswith(".")
    assert error.value.hint


@pytest.mark.parametrize(
    ("url", "normalized"),
    [
        ("HTTPS://Example.COM/Mcp", "https://example.com/Mcp"),
        ("  https://example.com/mcp\n", "https://example.com/mcp"),
        ("https://example.com:443/", "https://example.com/"),
        ("http://localhost:80/mcp", "http://localhost/mcp"),
        ("http://127.0.0.1:8000/mcp", "http://127.0.0.1:8000/mcp"),
        ("https://[2001:DB8::0001]:8443/x", "https://[2001:db8::1]:8443/x"),
        ("https://bücher.example/ä?ö=1", "https://xn--bcher-kva.example/%C3%A4?%C3%B6=1"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example/"),
        ("https://x.example/${TENANT}/mcp?k=${KEY}", "https://x.example/${TENANT}/mcp?k=${KEY}"),
        ("https://my_host.example?x=1", "https://my_host.example?x=1"),
        ("https://example.com/a%20b@c", "https://example.com/a%20b@c"),
    ],
)
def test_a_url_is_normalized(url, normalized):
    assert check_url(url, allow_http=True) == normalized
    assert check_url(normalized, allow_http=True) == normalized


def test_plain_http_is_rejected_unless_allowed():
    with pytest.raises(Invalid, match="unencrypted"):
        check_url("http://example.com/mcp", allow_http=False)


def test_an_error_never_repeats_the_password():
    with pytest.raises(Invalid) as error:
        check_url("https://bob:hunter2@example.com/", allow_http=False)
    assert "hunter2" not in f"{error.value.as_json()}"


def test_a_homograph_host_is_shown_as_punycode():
    [warning] = url_warnings("https://аpple.com/mcp")  # starts with a Cyrillic letter
    assert "xn--pple-43d.com" in warning
    assert url_warnings("https://apple.com/mcp") == []
    assert url_warnings("not an address") == []


def test_plain_http_to_another_machine_gives_a_warning():
    assert url_warnings("http://localhost:8000/mcp") == []
    assert "anyone on the network path" in url_warnings("http://intranet/mcp")[0]


@settings(deadline=None)  # a slow machine is not a failure
@given(st.text())
def test_check_url_is_idempotent(text):
    for candidate in (text, f"https://{text}", f"https://example.com/{text}"):
        try:
            normalized = check_url(candidate, allow_http=True)
        except Invalid:
            continue
        assert normalized.isascii()
        assert check_url(normalized, allow_http=True) == normalized


@pytest.mark.parametrize(
    "name",
    [
        *["LD_PRELOAD", "LD_LIBRARY_PATH", "ld_preload", "DYLD_INSERT_LIBRARIES", "PATH", "Path"],
        *["PYTHONSTARTUP", "PYTHONPATH", "PYTHONHOME", "NODE_OPTIONS", "BASH_ENV", "ENV", "IFS"],
        *["PERL5OPT", "RUBYOPT", "GIT_SSH_COMMAND", "JAVA_TOOL_OPTIONS", "TOOLCRIB_SECRET_KEY"],
        *["BUN_OPTIONS", "RUBYGEMS_GEMDEPS", "HOME", "NPM_CONFIG_USERCONFIG", "UV_INDEX_URL"],
        *["PIP_INDEX_URL", "npm_config_registry", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL"],
        *["PIP_CONFIG_FILE", "XDG_CONFIG_HOME", "DOTNET_STARTUP_HOOKS", "DOTNET_ROOT_X64"],
        *["GIT_TEMPLATE_DIR", "GIT_CONFIG_COUNT", "JAVA_OPTS", "YARN_REGISTRY", "BUNDLE_GEMFILE"],
        *["CORECLR_PROFILER_PATH", "R_PROFILE_USER", "LUA_INIT_5_4", "LESSOPEN", "EDITOR"],
        *["", "1A", "A-B", "A B", "A=B", "A\x00", "A\n", "É", "${A}", "A" * 201],
    ],
)
def test_an_invalid_or_dangerous_environment_variable_is_rejected(name):
    with pytest.raises(Invalid) as error:
        check_env(name, "x")
    assert error.value.code == "bad_env"
    assert error.value.hint


@pytest.mark.parametrize(
    "name",
    ["GITHUB_TOKEN", "GIT_AUTHOR_NAME", "npm_config_loglevel", "HOMEPAGE", "PIPELINE", "UVICORN"],
)
def test_an_environment_variable_may_resemble_a_denied_one(name):
    check_env(name, "x")


@pytest.mark.parametrize(
    "value", ["a\x00b", "a\nb", "a\rb", "\x1b[31m", PEM + "extra\n", "x" * 32769]
)
def test_an_environment_value_with_control_characters_is_rejected_and_not_repeated(value):
    with pytest.raises(Invalid) as error:
        check_env("API_KEY", value)
    assert value not in error.value.message


@pytest.mark.parametrize(
    "value", ["", "plain", "with\ttab", "späße", PEM, PEM.replace("\n", "\r\n"), PEM * 3]
)
def test_ordinary_values_and_pem_blocks_are_accepted(value):
    check_env("API_KEY", value)
    check_env("_x9", value)


def test_a_hostile_pem_block_causes_no_regex_backtracking():
    with pytest.raises(Invalid):
        check_env("KEY", "-----BEGIN A-----\nx\n-----END A-----\n" * 400 + "!\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("X-Key", bad) for bad in ["a\r\nHost: b", "a\nb", "a\x00b", " a", "a ", "\x7f", "ключ"]],
        *[(bad, "x") for bad in ["", "A B", "A:", "A\r\nB", "É", "A(", "${A}"]],
        *[(bad, "x") for bad in ["Host", "content-length", "Transfer-Encoding", "Connection"]],
        *[(bad, "x") for bad in ["Cookie", "Mcp-Session-Id", "mcp-anything", "Accept"]],
        *[(bad, "x") for bad in ["Content-Type", "Proxy-Authorization", "TE", "Upgrade"]],
    ],
)
def test_an_invalid_or_reserved_header_is_rejected(name, value):
    with pytest.raises(Invalid) as error:
        check_header(name, value)
    assert error.value.code == "bad_header"
    assert error.value.hint


def test_credential_headers_are_accepted():
    check_header("Authorization", "Bearer abc")
    check_header("X-Api-Key", "")


@pytest.mark.parametrize(
    ("argv", "cwd"),
    [
        ([], ""),
        ([""], ""),
        (["  "], ""),
        (["a\x00b"], ""),
        (["a", "b\x00"], ""),
        (["a\nb"], ""),
        (["a"], "/x\x00"),
        (["a"], "relative"),
        (["a"], "~/x"),
        (["a", "x" * 32768], ""),
        (["a" * 1001], ""),
    ],
)
def test_a_command_line_that_cannot_be_started_is_rejected(argv, cwd):
    with pytest.raises(Invalid) as error:
        check_argv(argv, cwd)
    assert error.value.code == "bad_argv"


def test_arguments_can_contain_dashes_quotes_and_line_breaks():
    check_argv(["npx", "-y", "--", "it's", "two\nlines"], "/srv")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["sh", "-c", "x"], "inline code"),
        (["/bin/bash", "-lc", "x"], "inline code"),
        (["cmd.exe", "/c", "npx", "-y", "pkg"], "inline code"),
        (["cmd", "/c", "npx", "-y", "pkg"], "without a pinned version"),
        (["python3.11", "-c", "x"], "inline code"),
        (["python", "-W", "ignore", "-Ic", "x"], "inline code"),
        (["node", "-e", "x"], "inline code"),
        (["node", "--eval=x"], "inline code"),
        (["deno", "eval", "x"], "inline code"),
        (["perl", "-e", "x"], "inline code"),
        (["bash", "start.sh"], "shell"),
        (["npx", "-y", "pkg"], "without a pinned version"),
        (["npx", "-y", "@scope/pkg"], "without a pinned version"),
        (["npx", "-y", "@scope/pkg@latest"], "without a pinned version"),
        (["npx", "--package=pkg", "run"], "without a pinned version"),
        (["pnpm", "dlx", "pkg"], "without a pinned version"),
        (["uvx", "mcp-server-time"], "without a pinned version"),
        (["uvx", "--from", "pkg", "cmd"], "without a pinned version"),
        (["uv", "tool", "run", "pkg"], "without a pinned version"),
        (["sudo", "node", "x.js"], "another user"),
        (["env", "A=b", "sudo", "-n", "sh", "-c", "x"], "inline code"),
        (["docker", "run", "-v", "/:/host", "img"], "directory of this machine"),
        (["docker", "run", "-v/etc:/etc", "img"], "directory of this machine"),
        (
            ["docker", "run", "--mount", "type=bind,src=/,dst=/h", "img"],
            "directory of this machine",
        ),
        (["docker", "run", "--privileged", "img"], "privileged"),
        (["docker", "run", "--network=host", "img"], "share"),
        (["./server"], "relative"),
        (["npx -y pkg"], "space"),
    ],
)
def test_a_risky_command_line_gives_a_warning(argv, text):
    assert any(text in warning for warning in argv_warnings(argv)), argv_warnings(argv)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["npx", "-y", "pkg@1.2.3"],
        ["npx", "-y", "@scope/pkg@1.2.3", "--flag"],
        ["uvx", "mcp-server-time==1.0"],
        ["uvx", "--from", "pkg==1.2.3", "cmd"],
        ["uvx", "pkg@1.2.3"],
        ["python", "server.py", "-c", "config"],
        ["python", "-m", "server"],
        ["node", "/srv/index.js", "-e", "prod"],
        ["docker", "run", "-v", "data:/data", "img"],
        ["/usr/bin/server", "--port", "80"],
        ["${X}"],
    ],
)
def test_an_ordinary_command_line_gives_no_warning(argv):
    assert argv_warnings(argv) == []


@settings(deadline=None)  # a slow machine is not a failure
@given(st.lists(st.text()))
def test_argv_warnings_never_raise(argv):
    assert all(warning.endswith(".") for warning in argv_warnings(argv))


def test_different_command_lines_have_different_digests():
    lines = [
        (["a", "b c"], ""),
        (["a", "b", "c"], ""),
        (["a b", "c"], ""),
        (["a", "b\x1fc"], ""),
        (["a", "b", "c", ""], ""),
        (["a", "b"], "c"),
        (["a", "b"], "/c"),
    ]
    assert len({argv_digest(argv, cwd) for argv, cwd in lines}) == len(lines)
    assert len(argv_digest(["a"], "")) == 64
    assert argv_digest(("a",), "") == argv_digest(["a"], "")


def test_format_argv_shows_the_full_command_line():
    assert format_argv(["npx", "-y", "a b", "it's", ""]) == "npx -y 'a b' 'it'\"'\"'s' ''"
    assert format_argv(["x", "a\u202eb", "c\nd"]) == "x 'a⟨U+202E⟩b' 'c⟨U+000A⟩d'"
    assert format_argv(["⟨U+202E⟩"]) == "'⟨U+27E8⟩U+202E⟩'"
    assert len(format_argv(["x" * 30000])) == 30000


@settings(deadline=None)  # a slow machine is not a failure
@given(st.lists(st.text(), min_size=1))
def test_format_argv_shows_no_invisible_characters(argv):
    line = format_argv(argv)
    assert "\n" not in line
    assert not any("\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in line)
    assert escape_ambiguous(line.replace("⟨", "")) == line.replace("⟨", "")
