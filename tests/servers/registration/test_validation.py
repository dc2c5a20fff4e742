"""What an admin may enter, and what is refused with a way out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.registration.validation import (
    argv_digest,
    argv_warnings,
    check_argv,
    check_env,
    check_header,
    check_url,
    escape_ambiguous,
    format_argv,
    url_warnings,
)
from toolcrib.lib.errors import Invalid

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
def test_a_hostile_address_is_refused_with_a_way_out(url):
    with pytest.raises(Invalid) as refused:
        check_url(url, allow_http=True)

    assert refused.value.code == "bad_url"
    assert refused.value.status == 422
    assert refused.value.message.endswith(".")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("url", "normal"),
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
def test_an_address_is_stored_in_its_normal_form(url, normal):
    assert check_url(url, allow_http=True) == normal
    assert check_url(normal, allow_http=True) == normal


def test_plain_http_needs_to_be_allowed():
    with pytest.raises(Invalid, match="unencrypted"):
        check_url("http://example.com/mcp", allow_http=False)


def test_a_refusal_never_repeats_the_password():
    with pytest.raises(Invalid) as refused:
        check_url("https://bob:hunter2@example.com/", allow_http=False)
    assert "hunter2" not in f"{refused.value.as_json()}"


def test_a_homograph_host_is_shown_as_punycode():
    [warning] = url_warnings("https://аpple.com/mcp")  # begins with a Cyrillic letter
    assert "xn--pple-43d.com" in warning
    assert url_warnings("https://apple.com/mcp") == []
    assert url_warnings("not an address") == []


def test_plain_http_to_another_machine_is_warned_of():
    assert url_warnings("http://localhost:8000/mcp") == []
    assert "anyone on the way" in url_warnings("http://intranet/mcp")[0]


@settings(deadline=None)  # a busy machine is no finding
@given(st.text())
def test_check_url_refuses_or_gives_an_address_that_stays_the_same(text):
    for candidate in (text, f"https://{text}", f"https://example.com/{text}"):
        try:
            normal = check_url(candidate, allow_http=True)
        except Invalid:
            continue
        assert normal.isascii()
        assert check_url(normal, allow_http=True) == normal


@pytest.mark.parametrize(
    "name",
    [
        *["LD_PRELOAD", "LD_LIBRARY_PATH", "ld_preload", "DYLD_INSERT_LIBRARIES", "PATH", "Path"],
        *["PYTHONSTARTUP", "PYTHONPATH", "PYTHONHOME", "NODE_OPTIONS", "BASH_ENV", "ENV", "IFS"],
        *["PERL5OPT", "RUBYOPT", "GIT_SSH_COMMAND", "JAVA_TOOL_OPTIONS", "TOOLCRIB_SECRET_KEY"],
        *["", "1A", "A-B", "A B", "A=B", "A\x00", "A\n", "É", "${A}", "A" * 201],
    ],
)
def test_an_environment_name_that_could_run_code_or_cannot_exist_is_refused(name):
    with pytest.raises(Invalid) as refused:
        check_env(name, "x")
    assert refused.value.code == "bad_env"
    assert refused.value.hint


@pytest.mark.parametrize(
    "value", ["a\x00b", "a\nb", "a\rb", "\x1b[31m", PEM + "extra\n", "x" * 32769]
)
def test_an_environment_value_with_a_break_or_nul_is_refused_and_not_repeated(value):
    with pytest.raises(Invalid) as refused:
        check_env("API_KEY", value)
    assert value not in refused.value.message


@pytest.mark.parametrize(
    "value", ["", "plain", "with\ttab", "späße", PEM, PEM.replace("\n", "\r\n"), PEM * 3]
)
def test_ordinary_values_and_pem_blocks_may_be_given(value):
    check_env("API_KEY", value)
    check_env("_x9", value)


def test_a_hostile_pem_block_is_judged_at_once():
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
def test_a_header_that_breaks_or_steers_the_request_is_refused(name, value):
    with pytest.raises(Invalid) as refused:
        check_header(name, value)
    assert refused.value.code == "bad_header"
    assert refused.value.hint


def test_credentials_may_be_given_as_headers():
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
def test_a_command_line_that_cannot_be_started_is_refused(argv, cwd):
    with pytest.raises(Invalid) as refused:
        check_argv(argv, cwd)
    assert refused.value.code == "bad_argv"


def test_arguments_may_hold_dashes_quotes_and_line_breaks():
    check_argv(["npx", "-y", "--", "it's", "two\nlines"], "/srv")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["sh", "-c", "x"], "code written"),
        (["/bin/bash", "-lc", "x"], "code written"),
        (["cmd.exe", "/c", "npx", "-y", "pkg"], "code written"),
        (["cmd", "/c", "npx", "-y", "pkg"], "without a fixed version"),
        (["python3.11", "-c", "x"], "code written"),
        (["python", "-W", "ignore", "-Ic", "x"], "code written"),
        (["node", "-e", "x"], "code written"),
        (["node", "--eval=x"], "code written"),
        (["deno", "eval", "x"], "code written"),
        (["perl", "-e", "x"], "code written"),
        (["bash", "start.sh"], "shell"),
        (["npx", "-y", "pkg"], "without a fixed version"),
        (["npx", "-y", "@scope/pkg"], "without a fixed version"),
        (["npx", "-y", "@scope/pkg@latest"], "without a fixed version"),
        (["npx", "--package=pkg", "run"], "without a fixed version"),
        (["pnpm", "dlx", "pkg"], "without a fixed version"),
        (["uvx", "mcp-server-time"], "without a fixed version"),
        (["uvx", "--from", "pkg", "cmd"], "without a fixed version"),
        (["uv", "tool", "run", "pkg"], "without a fixed version"),
        (["sudo", "node", "x.js"], "rights"),
        (["env", "A=b", "sudo", "-n", "sh", "-c", "x"], "code written"),
        (["docker", "run", "-v", "/:/host", "img"], "folder of this machine"),
        (["docker", "run", "-v/etc:/etc", "img"], "folder of this machine"),
        (["docker", "run", "--mount", "type=bind,src=/,dst=/h", "img"], "folder of this machine"),
        (["docker", "run", "--privileged", "img"], "privileged"),
        (["docker", "run", "--network=host", "img"], "share"),
        (["./server"], "relative"),
        (["npx -y pkg"], "space"),
    ],
)
def test_a_risky_command_line_is_explained(argv, word):
    assert any(word in warning for warning in argv_warnings(argv)), argv_warnings(argv)


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
def test_an_ordinary_command_line_gets_no_advice(argv):
    assert argv_warnings(argv) == []


@settings(deadline=None)  # a busy machine is no finding
@given(st.lists(st.text()))
def test_advice_never_fails(argv):
    assert all(warning.endswith(".") for warning in argv_warnings(argv))


def test_the_digest_tells_every_two_command_lines_apart():
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


def test_the_command_line_is_shown_exactly_and_whole():
    assert format_argv(["npx", "-y", "a b", "it's", ""]) == "npx -y 'a b' 'it'\"'\"'s' ''"
    assert format_argv(["x", "a\u202eb", "c\nd"]) == "x 'a⟨U+202E⟩b' 'c⟨U+000A⟩d'"
    assert format_argv(["⟨U+202E⟩"]) == "'⟨U+27E8⟩U+202E⟩'"
    assert len(format_argv(["x" * 30000])) == 30000


@settings(deadline=None)  # a busy machine is no finding
@given(st.lists(st.text(), min_size=1))
def test_nothing_shown_is_invisible(argv):
    shown = format_argv(argv)
    assert "\n" not in shown
    assert not any("\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in shown)
    assert escape_ambiguous(shown.replace("⟨", "")) == shown.replace("⟨", "")
