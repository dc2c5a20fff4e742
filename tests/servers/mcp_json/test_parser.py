"""Parsing of mcp.json in every format, and export without secrets."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servers.mcp_json.exporter import SHAPES, ExportRow, export_mcp_json
from servers.mcp_json.parser import parse_mcp_json
from servers.models import Server
from servers.registration.drafts import ImportCheck, ServerDraft, make_slug, target_string
from servers.secret import Secret


def parse(document, **options) -> ImportCheck:
    text = document if isinstance(document, str) else json.dumps(document)
    options = {"variables": {}, "allow_http": True, **options}
    return parse_mcp_json(text, **options)


def parse_one(document, **options) -> ServerDraft:
    check = parse(document, **options)
    assert check.problems == ()
    [draft] = check.drafts
    return draft


def server(**entry):
    return {"mcpServers": {"one": entry}}


def parse_problem(document, **options):
    check = parse(document, **options)
    assert check.drafts == ()
    [problem] = check.problems
    assert problem.message.endswith(".")
    assert problem.hint
    return problem


def revealed(secrets):
    return {name: secret.reveal() for name, secret in secrets.items()}


class TestShapes:
    def test_claude_desktop(self):
        draft = parse_one(server(command="/bin/srv", args=["-v"], env={"API_KEY": "k"}, cwd="/srv"))
        assert draft.transport == "stdio"
        assert draft.argv == ("/bin/srv", "-v")
        assert draft.cwd == "/srv"
        assert revealed(draft.env) == {"API_KEY": "k"}
        assert draft.secrets_found == 1
        assert draft.ready

    def test_claude_code_with_defaults(self):
        entry = {
            "type": "http",
            "url": "${API_BASE_URL:-https://api.example.com}/mcp",
            "headers": {"Authorization": "Bearer ${API_KEY}"},
        }
        check = parse(server(**entry), variables={"API_KEY": "k"})
        [draft] = check.drafts
        assert check.shape == "claude"
        assert draft.url == "https://api.example.com/mcp"
        assert revealed(draft.headers) == {"Authorization": "Bearer k"}

    def test_vscode_with_inputs_comments_and_trailing_commas(self):
        check = parse(
            """\ufeff{
              // prompted once
              "inputs": [{"type": "promptString", "id": "api-key", "description": "Key",
                          "password": true},],
              "servers": {
                "perplexity": {"type": "stdio", "command": "srv", /* inline */
                  "env": {"KEY": "${input:api-key}"}, "envFile": "${workspaceFolder}/.env",},
              },
            }""",
            variables={"api-key": "v"},
        )
        [draft] = check.drafts
        assert check.shape == "vscode"
        assert [dict(item) for item in check.inputs] == [
            {"id": "api-key", "name": "api_key", "description": "Key", "password": True}
        ]
        assert revealed(draft.env) == {"KEY": "v"}
        assert draft.unknown == {"envFile": "${workspaceFolder}/.env"}
        assert any("envFile is not supported" in warning for warning in draft.warnings)

    def test_vscode_settings_with_servers_nested_under_mcp(self):
        check = parse({"mcp": {"servers": {"a": {"command": "srv"}}}, "editor.fontSize": 12})
        assert check.shape == "vscode"
        assert [draft.slug for draft in check.drafts] == ["a"]

    def test_cursor_with_a_url_and_no_type(self):
        check = parse(server(url="https://x.example/sse", headers={"X-Key": "${env:KEY}"}))
        [draft] = check.drafts
        assert check.shape == "cursor"
        assert draft.transport == "sse"
        assert draft.missing == ("KEY",)

    def test_a_bare_map_of_servers(self):
        check = parse({"a": {"command": "srv"}, "b": {"url": "https://x.example/mcp"}})
        assert check.shape == "map"
        assert [draft.transport for draft in check.drafts] == ["stdio", "http"]

    def test_a_single_server(self):
        check = parse({"name": "My Server", "command": "srv"})
        assert (check.shape, check.drafts[0].slug) == ("single", "my-server")
        assert parse({"url": "https://x.example"}).drafts[0].slug == "server"

    def test_a_readme_excerpt_without_braces(self):
        assert parse_one('"github": {"command": "srv"},').slug == "github"

    @pytest.mark.parametrize(
        ("declared", "transport"),
        [
            *[("http", "http"), ("streamable-http", "http"), ("streamableHttp", "http")],
            ("sse", "sse"),
        ],
    )
    @pytest.mark.parametrize("field", ["type", "transport"])
    def test_a_declared_transport_is_used(self, field, declared, transport):
        draft = parse_one(server(**{field: declared, "url": "https://x.example/"}))
        assert draft.transport == transport


class TestProblems:
    @pytest.mark.parametrize(
        ("text", "position"),
        [
            ("", "Line 1, column 1"),
            ('{"a":\n  {"b" 1}}', "Line 2, column 8"),
            ("{'a': 1}", "Line 1, column 2"),
            ('{"a": nope}', "Line 1, column 7"),
            ('{"a": [1 2]}', "Line 1, column 10"),
            ('{"a": "b\n"}', "Line 1, column 7"),
            ('{"a": 1} x', "Line 1, column 10"),
            ('{"a": 1', "Line 1, column 8"),
            ("/* never closed", "Line 1, column 1"),
            ('{"a": "\\x"}', "Line 1, column 8"),
            ('{"a": "\\ud800"}', "Line 1, column 7"),
            ('{"a": 1e999}', "Line 1, column 7"),
            ("[" * 100, "Line 1, column 34"),
        ],
    )
    def test_a_syntax_error_has_line_and_column(self, text, position):
        problem = parse_problem(text)
        assert problem.code == "not_json"
        assert problem.message.startswith(position)

    def test_a_syntax_error_does_not_quote_the_text(self):
        assert "hunter2" not in repr(parse('{"password": hunter2}'))

    @pytest.mark.parametrize("document", ["[]", "1", '"x"', "{}", '{"mcpServers": {}}', '{"a": 1}'])
    def test_json_without_servers_gives_an_example(self, document):
        assert "mcpServers" in parse_problem(document).hint

    def test_a_duplicate_name_is_reported_and_the_first_one_is_used(self):
        check = parse('{"mcpServers": {"a": {"command": "one"},\n "a": {"command": "two"}}}')
        assert [draft.command for draft in check.drafts] == ["one"]
        assert [(p.name, p.code) for p in check.problems] == [("a", "duplicate_key")]
        assert "line 2" in check.problems[0].message

    def test_a_duplicate_field_makes_the_entry_invalid(self):
        assert parse_problem('{"mcpServers": {"a": {"command": "x", "command": "y"}}}').name == "a"

    @pytest.mark.parametrize(
        ("entry", "code"),
        [
            ({}, "no_target"),
            ({"command": ""}, "no_target"),
            ({"command": "x", "url": "https://x.example"}, "ambiguous"),
            ({"type": "http", "command": "x"}, "ambiguous"),
            ({"type": "ws", "url": "https://x.example"}, "bad_transport"),
            ({"command": ["x"]}, "bad_type"),
            ({"command": "x", "args": "-y pkg"}, "bad_type"),
            ({"command": "x", "args": [None]}, "bad_type"),
            ({"command": "x", "env": ["A=b"]}, "bad_type"),
            ({"command": "x", "env": {"A": None}}, "bad_type"),
            ({"command": "x", "env": {"A": {"b": 1}}}, "bad_type"),
            ({"command": "x", "disabled": "yes"}, "bad_type"),
            ({"command": "x", "env": {"LD_PRELOAD": "/x.so"}}, "bad_env"),
            ({"command": "x", "env": {"A": "b\nc"}}, "bad_env"),
            ({"command": "x", "args": ["a\x00"]}, "bad_argv"),
            ({"command": "x", "cwd": "here"}, "bad_argv"),
            ({"command": "x --token ghp_abcdefghijklmnopqrst"}, "bad_argv"),
            ({"url": "file:///etc/passwd"}, "bad_url"),
            ({"url": "https://bob:hunter2@x.example"}, "bad_url"),
            ({"url": "https://x.example:6379"}, "bad_url"),
            ({"url": "https://${HOST}/mcp"}, "bad_url"),
            ({"url": "${BASE}/mcp"}, "missing_variable"),
            ({"url": "https://x.example", "headers": {"Host": "y"}}, "bad_header"),
            ({"url": "https://x.example", "headers": {"A": "b\r\nc"}}, "bad_header"),
            ({"url": "https://x.example", "headers": {"A": "b", "a": "c"}}, "bad_header"),
            ("npx", "bad_server"),
            (None, "bad_server"),
        ],
    )
    def test_an_invalid_server_does_not_affect_the_others(self, entry, code):
        check = parse({"mcpServers": {"bad": entry, "good": {"command": "srv"}}})
        assert [draft.slug for draft in check.drafts] == ["good"]
        [problem] = check.problems
        assert (problem.name, problem.code) == ("bad", code)
        assert problem.message.endswith(".")
        assert "hunter2" not in repr(check)

    def test_numbers_and_booleans_are_converted_to_strings_with_a_warning(self):
        draft = parse_one(server(command="x", args=["--port", 80], env={"PORT": 80, "DEBUG": True}))
        assert draft.args == ("--port", "80")
        assert revealed(draft.env) == {"PORT": "80", "DEBUG": "true"}
        assert len(draft.warnings) == 3

    def test_size_limits(self):
        assert parse_problem('{"a": "' + "x" * 2**20 + '"}').code == "too_large"
        check = parse({"mcpServers": {f"s{n}": {"command": "x"} for n in range(201)}})
        assert len(check.drafts) == 200
        assert [problem.code for problem in check.problems] == ["too_many"]

    @pytest.mark.parametrize(
        "entry",
        [
            {"command": "x", "args": ["a=" * 10_000]},
            {"command": "x", "args": ["--token", "a"] * 1000},
            {"command": "x", "args": ["${" * 10_000, "://" * 3000]},
            {"command": "x", "env": {"A": "".join(f"${{v{n}}}" for n in range(50_000))}},
            {"command": "x", "env": {f"A{n}": "" for n in range(50_000)}},
            {"url": "https://x.example", "headers": {f"A{n}": "" for n in range(50_000)}},
            {"command": "x", "extra": "a=" * 100_000 + "://"},
            {"command": "x", "extra": "x://?" + "a&" * 400_000},
        ],
    )
    @pytest.mark.timeout(10)
    def test_hostile_input_is_parsed_in_bounded_time(self, entry):
        check = parse(server(**entry))
        assert len(check.drafts) + len(check.problems) == 1

    def test_oversized_unknown_fields_are_dropped(self):
        draft = parse_one(server(command="x", extra="y" * 20_000))
        assert draft.unknown == {}
        assert any("dropped" in warning for warning in draft.warnings)

    def test_plain_http_is_rejected_unless_allowed(self):
        assert parse_problem(server(url="http://x.example"), allow_http=False).code == "bad_url"


class TestVariables:
    def test_references_in_arguments_and_urls_are_normalized_and_their_values_stored_separately(
        self,
    ):
        draft = parse_one(
            server(
                command="x", args=["--a=${env:A}", "${B:-two}", "-i", "p/${input:my-id}", "${C}"]
            ),
            variables={"A": "one", "my-id": "three"},
        )
        # A default is plain text in the file, so it is expanded.
        assert draft.args == ("--a=${A}", "two", "-i", "p/${my_id}", "${C}")
        assert revealed(draft.variables) == {"A": "one", "my_id": "three"}
        assert draft.missing == ("C",)
        assert not draft.ready

        draft = parse_one(server(url="https://x.example/${T}?k=${K}"), variables={"K": "v"})
        assert draft.url == "https://x.example/${T}?k=${K}"
        assert revealed(draft.variables) == {"K": "v"}
        assert draft.missing == ("T",)

    def test_an_input_and_a_variable_with_the_same_name_stay_separate(self):
        draft = parse_one(server(command="x", args=["${input:a-b}", "${a_b}"]))
        assert len(set(draft.args)) == len(draft.missing) == 2

    def test_editor_variables_are_missing_and_give_a_warning(self):
        draft = parse_one(server(command="x", args=["${workspaceFolder}/a", "${userHome}"]))
        assert draft.args == ("${workspaceFolder}/a", "${userHome}")
        assert draft.missing == ("workspaceFolder", "userHome")
        assert sum("editor variable" in warning for warning in draft.warnings) == 2

    def test_variables_in_the_command_and_working_directory_are_expanded(self):
        document = server(command="${ROOT}/bin/srv", cwd="${ROOT}", args=["${PY:-x}"])
        draft = parse_one(document, variables={"ROOT": "/opt"})
        assert (draft.command, draft.cwd) == ("/opt/bin/srv", "/opt")
        assert parse_one(server(command="${PY:-python3}")).command == "python3"
        assert parse_one(document).missing == ("ROOT",)

    def test_a_secret_is_never_expanded_into_a_command_or_host(self):
        for entry in (
            {"command": "${KEY}"},
            {"command": "x", "cwd": "${KEY}"},
            {"url": "${KEY}"},
            {"url": "https://${KEY}.evil.example/"},
        ):
            check = parse(server(**entry), variables={"KEY": "hunter2-hunter2"})
            assert check.drafts == ()
            assert "hunter2" not in repr(check)

    def test_a_variable_cannot_inject_into_a_url(self):
        check = parse(server(url="https://x.example/?a=${A}"), variables={"A": "b\r\nHost: c"})
        assert [problem.code for problem in check.problems] == ["bad_variable"]

    def test_a_path_where_no_variable_may_stand_is_written_out(self):
        document = server(command="npx", args=["-y", "files@1.0.0", "${workspaceFolder}"])
        assert parse_one(document).missing == ("workspaceFolder",)
        draft = parse_one(document, variables={"workspaceFolder": "/home/me/notes"})
        assert draft.args == ("-y", "files@1.0.0", "/home/me/notes")
        assert not draft.variables

    def test_conflicting_defaults_give_a_warning(self):
        draft = parse_one(server(command="x", args=["${A:-1}", "${A:-2}"]))
        assert draft.args == ("1", "1")
        assert any("conflicting defaults" in warning for warning in draft.warnings)


class TestPlaintextSecrets:
    @pytest.mark.parametrize(
        ("args", "expected", "secret"),
        [
            (["--api-key=s3cret"], ["--api-key=${ONE_API_KEY}"], "s3cret"),
            (["--token", "s3cret"], ["--token", "${ONE_TOKEN}"], "s3cret"),
            (["--dbPassword", "pw"], ["--dbPassword", "${ONE_DBPASSWORD}"], "pw"),
            (
                ["--header", "Authorization: Bearer s3cret"],
                ["--header", "Authorization: Bearer ${ONE_AUTHORIZATION}"],
                "s3cret",
            ),
            (
                ["postgresql://bob:s3cret@db/x"],
                ["postgresql://bob:${ONE_PASSWORD}@db/x"],
                "s3cret",
            ),
            (
                ["https://x.example/mcp?api_key=s3cret&a=b"],
                ["https://x.example/mcp?api_key=${ONE_API_KEY}&a=b"],
                "s3cret",
            ),
            *[
                (["--as", f"pre {token}"], ["--as", "pre ${ONE_TOKEN}"], token)
                for token in (
                    "ghp_abcdefghijklmnopqrst0123456789",
                    "sk-" + "a1B2" * 6,
                    "xoxb-1234567890-abcdef",
                    "AKIAIOSFODNN7EXAMPLE",
                    "github_pat_11ABCDEFG0123456789_abc",
                )
            ],
        ],
    )
    def test_a_secret_in_an_argument_is_extracted(self, args, expected, secret):
        draft = parse_one(server(command="x", args=args))
        assert list(draft.args) == expected
        assert list(revealed(draft.variables).values()) == [secret]
        assert draft.secrets_found == 1
        assert any("stored encrypted" in warning for warning in draft.warnings)
        assert secret not in repr(draft)

    def test_a_secret_in_the_environment_of_a_container_is_extracted(self):
        args = ["run", "-i", "--rm", "-e", "API_KEY=s3cret", "image"]
        draft = parse_one(server(command="docker", args=args))
        assert draft.args[4] == "API_KEY=${ONE_API_KEY}"
        assert revealed(draft.variables) == {"ONE_API_KEY": "s3cret"}

    def test_a_secret_where_no_variable_may_stand_is_rejected_and_not_repeated(self):
        secret = "ghp_abcdefghijklmnopqrst0123456789"
        check = parse(server(command="x", args=[f"pre {secret}"]))
        assert [problem.code for problem in check.problems] == ["bad_argv"]
        assert secret not in repr(check)

    @pytest.mark.parametrize(
        "args",
        [
            ["--max-tokens", "100"],
            ["--token-limit=5"],
            ["--key-file", "/etc/key.pem"],
            ["--private-key", "/etc/key.pem"],
            ["--sort-key", "name"],
            ["--token-env", "GITHUB_TOKEN"],
            ["--token", "--verbose"],
            ["-y", "@modelcontextprotocol/server-github@1.0.0"],
            ["https://x.example/mcp?page=2"],
            ["/home/me/projects/a-rather-long-folder-name-2024"],
        ],
    )
    def test_ordinary_arguments_are_unchanged(self, args):
        draft = parse_one(server(command="x", args=args))
        assert args == list(draft.args)
        assert draft.secrets_found == 0

    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("?key=abc", "?key=${ONE_KEY}"),
            ("?a=1&access_token=abc&b=2", "?a=1&access_token=${ONE_ACCESS_TOKEN}&b=2"),
            ("s/Zk39fLq0XwT7bV2nM5cR8yJ1/mcp", "s/${ONE_URL_KEY}/mcp"),
            ("?token=${T}", "?token=${T}"),
            (
                "v1/projects/my-long-project-name-here/mcp",
                "v1/projects/my-long-project-name-here/mcp",
            ),
        ],
    )
    def test_a_secret_in_a_url_is_extracted(self, url, expected):
        assert (
            parse_one(server(url=f"https://x.example/{url}")).url == f"https://x.example/{expected}"
        )

    def test_two_secrets_with_the_same_name_get_different_variables(self):
        draft = parse_one(server(command="x", args=["--token=a1", "--token=b2", "--token=a1"]))
        assert draft.args == (
            "--token=${ONE_TOKEN}",
            "--token=${ONE_TOKEN_2}",
            "--token=${ONE_TOKEN}",
        )

    def test_an_extracted_secret_does_not_reuse_a_variable_name_of_the_file(self):
        draft = parse_one(server(command="x", args=["--token=a1", "${ONE_TOKEN}"]))
        assert draft.args == ("--token=${ONE_TOKEN_2}", "${ONE_TOKEN}")
        assert draft.missing == ("ONE_TOKEN",)

    def test_secrets_in_unknown_fields_are_redacted(self):
        draft = parse_one(
            server(url="https://x.example", auth={"CLIENT_ID": "me", "CLIENT_SECRET": "hunter2"})
        )
        assert draft.unknown == {"auth": {"CLIENT_ID": "•••", "CLIENT_SECRET": "•••"}}
        assert any("auth" in warning for warning in draft.warnings)


class TestInlineCode:
    """Inline code is confirmed in full: nothing in it is variable."""

    @pytest.mark.parametrize(
        "args",
        [["-c", "echo ${NAME}"], ["-lc", "run ${input:x}"]],
    )
    def test_a_variable_in_inline_code_is_rejected(self, args):
        check = parse(server(command="sh", args=args), variables={"NAME": "x", "x": "y"})
        assert [problem.code for problem in check.problems] == ["bad_argv"]

    def test_a_default_in_inline_code_is_expanded(self):
        draft = parse_one(server(command="sh", args=["-c", "${REGION:-touch /tmp/x}"]))
        assert draft.args == ("-c", "touch /tmp/x")

    def test_no_secret_is_extracted_from_inline_code(self):
        draft = parse_one(server(command="sh", args=["-c", "token=$(touch /tmp/x) exit"]))
        assert draft.args == ("-c", "token=$(touch /tmp/x) exit")
        assert not draft.variables


class TestNamesAndDuplicates:
    @pytest.mark.parametrize(
        ("name", "slug"),
        [
            ("GitHub", "github"),
            ("My  Server_v2!", "my-server-v2"),
            ("--x--", "x"),
            ("日本", "server"),
            ("", "server"),
            ("a" * 40, "a" * 32),
            ("a" * 31 + " b", "a" * 31),
        ],
    )
    def test_a_slug_is_derived_from_the_name(self, name, slug):
        assert make_slug(name, set()) == slug

    def test_a_taken_slug_gets_a_number_within_the_length_limit(self):
        long = "a" * 40
        check = parse(
            {"mcpServers": {"x": {"command": "1"}, "X": {"command": "2"}, long: {"command": "3"}}},
            taken_slugs=["x", "a" * 32],
        )
        assert [draft.slug for draft in check.drafts] == ["x-2", "x-3", "a" * 30 + "-2"]

    def test_an_invalid_server_takes_no_slug(self):
        check = parse({"mcpServers": {"a": {}, "A": {"command": "x"}}})
        assert [draft.slug for draft in check.drafts] == ["a"]

    def test_a_duplicate_within_the_file_gives_a_warning_even_with_other_secrets(self):
        entry = {"command": "x", "args": ["--token", "one1"]}
        check = parse({"mcpServers": {"a": entry, "b": {**entry, "args": ["--token", "two2"]}}})
        assert not any("Duplicate" in warning for warning in check.drafts[0].warnings)
        assert "Duplicate of a." in check.drafts[1].warnings

    def test_a_registered_server_gives_a_warning(self):
        existing = {target_string("http", "https://x.example/mcp", "", []): "known"}
        draft = parse_one(server(url="https://X.example:443/mcp"), existing=existing)
        assert "Duplicate of known." in draft.warnings
        assert draft.target in existing

    def test_unknown_fields_are_stored_and_listed(self):
        draft = parse_one(server(command="x", autoApprove=["a"], timeout=30, disabled=True))
        assert draft.unknown == {"autoApprove": ["a"], "timeout": 30}
        assert draft.disabled
        assert any("autoApprove, timeout" in warning for warning in draft.warnings)

    def test_masked_contains_names_and_the_command_line_but_no_values(self):
        masked = parse_one(
            server(command="x", args=["a b", "\u202e"], env={"KEY": "hunter2"})
        ).masked()
        assert masked["argv"] == "x 'a b' '⟨U+202E⟩'"
        assert masked["env"] == {"KEY": "•••"}
        assert "hunter2" not in json.dumps(masked)


def http_row(slug: str, url: str, header: str) -> ExportRow:
    return ExportRow(Server(slug=slug, transport="http", url=url), header_names=[header])


def stdio_row(slug: str, env_names: list[str], **fields) -> ExportRow:
    server = Server(slug=slug, transport="stdio", command="srv", **fields)
    return ExportRow(server, env_names)


class TestExport:
    def test_every_credential_is_a_reference(self):
        rows = [
            http_row("web", "https://x.example/?k=${WEB_K}", "X-Key"),
            stdio_row("a", ["KEY", "ONLY_A"], args=["-t", "${T}"], cwd="/srv"),
            stdio_row("b", ["KEY"], unknown_fields={"timeout": 3}),
        ]
        document = json.loads(export_mcp_json(rows))
        assert document == {
            "mcpServers": {
                "a": {
                    "type": "stdio",
                    "command": "srv",
                    "args": ["-t", "${T}"],
                    "cwd": "/srv",
                    "env": {"KEY": "${A_KEY}", "ONLY_A": "${ONLY_A}"},
                },
                "b": {
                    "type": "stdio",
                    "command": "srv",
                    "args": [],
                    "env": {"KEY": "${B_KEY}"},
                    "timeout": 3,
                },
                "web": {
                    "type": "http",
                    "url": "https://x.example/?k=${WEB_K}",
                    "headers": {"X-Key": "${WEB_X_KEY}"},
                },
            }
        }
        assert export_mcp_json(rows) == export_mcp_json(rows[::-1])

        check = parse(export_mcp_json(rows))
        assert check.problems == ()
        assert [draft.missing for draft in check.drafts] == [
            ("A_KEY", "ONLY_A", "T"),
            ("B_KEY",),
            ("WEB_X_KEY", "WEB_K"),
        ]

    def test_vscode_prompts_for_each_secret(self):
        rows = [http_row("web", "https://x.example/?k=${K}", "X-Key"), stdio_row("a", ["KEY"])]
        text = export_mcp_json(rows, "vscode")
        document = json.loads(text)
        assert document["servers"]["a"]["env"] == {"KEY": "${input:KEY}"}
        assert document["servers"]["web"] == {
            "type": "http",
            "url": "https://x.example/?k=${input:K}",
            "headers": {"X-Key": "${input:WEB_X_KEY}"},
        }
        assert [item["id"] for item in document["inputs"]] == ["K", "KEY", "WEB_X_KEY"]
        assert {(item["type"], item["password"]) for item in document["inputs"]} == {
            ("promptString", True)
        }
        assert parse(text).shape == "vscode"

    def test_cursor_reads_variables_from_the_environment(self):
        rows = [http_row("web", "https://x.example", "X-Key"), stdio_row("a", ["KEY"])]
        text = export_mcp_json(rows, "cursor")
        assert json.loads(text)["mcpServers"] == {
            "a": {
                "type": "stdio",
                "command": "srv",
                "args": [],
                "env": {"KEY": "${env:KEY}"},
            },
            "web": {"url": "https://x.example", "headers": {"X-Key": "${env:WEB_X_KEY}"}},
        }
        assert parse(text).shape == "cursor"

    def test_colliding_variable_names_are_numbered(self):
        rows = [
            http_row("a", "https://x.example", "B-C"),
            http_row("a-b", "https://y.example", "C"),
        ]
        missing = [draft.missing for draft in parse(export_mcp_json(rows)).drafts]
        assert missing == [("A_B_C",), ("A_B_C_2",)]


def to_export_row(draft: ServerDraft) -> ExportRow:
    fields = {**draft.connection_fields(), "unknown_fields": draft.unknown}
    return ExportRow(Server(slug=draft.slug, **fields), [*draft.env], [*draft.headers])


SECRET = "ghp_Zq81LmNc02VxPwRt7YkDs5HbJf3G"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
fields = st.sampled_from(
    ["command", "args", "env", "headers", "url", "type", "cwd", "name", "disabled", "extra"]
)
invalid_servers = st.dictionaries(st.text(), st.dictionaries(fields, json_values) | json_values)
words = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8)
references = st.sampled_from(["${K}", "${env:K}", "${K:-d}", "${input:k}", "--token=" + SECRET])
commands = st.fixed_dictionaries(
    {"command": st.just("srv"), "args": st.lists(words | references, max_size=4)},
    optional={
        "env": st.dictionaries(st.sampled_from("ABC"), st.sampled_from([SECRET, "${K}", "x"])),
        "extra": st.sampled_from([SECRET, {"token": SECRET}, [f"--api-key={SECRET}"]]),
    },
)
addresses = st.fixed_dictionaries(
    {
        "url": st.sampled_from(["", f"/{SECRET}", f"?key={SECRET}", "?a=${K}"]).map(
            "https://h{}".format
        )
    },
    optional={
        "headers": st.dictionaries(st.sampled_from("ABC"), st.sampled_from([SECRET, "${K}"]))
    },
)
valid_servers = st.dictionaries(st.text(max_size=40), commands | addresses, min_size=1, max_size=6)


@settings(deadline=None)  # a slow machine is not a failure
@given(st.text() | json_values.map(json.dumps) | st.text('{}[]",:/* \\"\n1a', max_size=40))
def test_parsing_never_raises_for_any_text(text):
    check = parse(text)
    assert check.drafts or check.problems


@settings(deadline=None)  # a slow machine is not a failure
@given(invalid_servers)
def test_parsing_never_raises_for_any_server(servers):
    check = parse({"mcpServers": servers})
    assert len(check.drafts) + len(check.problems) == max(1, len(servers))
    json.dumps([draft.masked() for draft in check.drafts])


@settings(deadline=None)  # a slow machine is not a failure
@given(valid_servers, st.sets(st.sampled_from(["server", "a", "b-2"])))
def test_slugs_are_valid_and_unique(servers, taken):
    slugs = [draft.slug for draft in parse({"mcpServers": servers}, taken_slugs=taken).drafts]
    assert all(re.fullmatch(r"[a-z0-9-]{1,32}", slug) for slug in slugs)
    assert len({*slugs, *taken}) == len(slugs) + len(taken)


@settings(deadline=None)  # a slow machine is not a failure
@given(valid_servers)
def test_no_secret_is_printed_or_exported(servers):
    value = "v4lue-of-K"
    check = parse({"mcpServers": servers}, variables={"K": value, "k": value})
    output = repr(check) + json.dumps([draft.masked() for draft in check.drafts])
    output += export_mcp_json([to_export_row(draft) for draft in check.drafts])
    assert SECRET not in output
    assert value not in output


@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None)  # a slow machine is not a failure
@given(servers=valid_servers)
def test_an_export_parses_back_to_the_same_servers(shape, servers):
    first = parse({"mcpServers": servers}).drafts
    second = parse(export_mcp_json([to_export_row(draft) for draft in first], shape))
    assert second.problems == ()
    by_slug = {draft.slug: draft for draft in first}
    for draft in second.drafts:
        before = by_slug[draft.slug]
        assert (draft.transport, draft.command, draft.args, draft.cwd, draft.url) == (
            before.transport,
            before.command,
            before.args,
            before.cwd,
            before.url,
        )
        assert set(draft.env) == set(before.env)
        assert set(draft.headers) == set(before.headers)
        assert draft.unknown == before.unknown
        assert len(draft.missing) >= len(draft.env) + len(draft.headers)
        assert set(before.variables) <= set(draft.missing)


def test_drafts_compare_by_value():
    assert parse_one(server(command="x", env={"A": "b"})).env == {"A": Secret("b")}
