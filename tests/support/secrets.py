"""Secrets of many kinds to plant: what must not be found afterwards, and what carries it."""

import base64
import json
from dataclasses import dataclass
from typing import Any

PASSWORD = "hunter2-Correct.Horse"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJlLXBsYW50ZWQ"
PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEplantedplantedplantedplanted\n"
    "-----END RSA PRIVATE KEY-----"
)


@dataclass(frozen=True)
class PlantedSecret:
    kind: str
    secret: str  # found nowhere afterwards
    value: dict[str, Any]  # arguments or structured content that contain it


def _named(name: str, number: int) -> PlantedSecret:
    secret = f"{PASSWORD}-{number:02}"
    return PlantedSecret(name, secret, {name: secret})


def _text(kind: str, secret: str, text: str = "{}") -> PlantedSecret:
    return PlantedSecret(kind, secret, {"text": f"See {text.replace('{}', secret)} for details."})


NAMES = (
    *("password", "password_confirmation", "api_key", "api-key", "x-api-key", "pwd", "passcode"),
    *("auth", "bearer", "private-key", "token", "tokens", "pin", "sessionid", "otp", "accessKey"),
)
PLANTED = (
    *(_named(name, number) for number, name in enumerate(NAMES)),
    PlantedSecret(
        "connection_string", "pw-in-url-1", {"connection_string": "postgres://u:pw-in-url-1@h/db"}
    ),
    PlantedSecret("JSON in a text", "json-pw-1", {"text": json.dumps({"password": "json-pw-1"})}),
    PlantedSecret(
        "JSON in JSON in a text",
        "deep-pw-1",
        {"text": json.dumps({"body": json.dumps({"a": json.dumps({"apiKey": "deep-pw-1"})})})},
    ),
    PlantedSecret("object", "in-object-1", {"credentials": {"user": "u", "value": "in-object-1"}}),
    PlantedSecret("pair", "in-pair-1", {"env": [{"name": "DB_PASSWORD", "value": "in-pair-1"}]}),
    PlantedSecret("option", "in-option-1", {"argv": ["run", "--password", "in-option-1"]}),
    PlantedSecret("key", "ghp_" + "k3y" * 10, {"by_token": {"ghp_" + "k3y" * 10: 1}}),
    _text("JWT", JWT),
    _text("bearer header", "dGhlLXNlY3JldA12", "Authorization: Bearer {}"),
    _text("basic header", "dXNlcjpwYXNzd29yZA==", 'curl -H "Authorization: Basic {}"'),
    _text("AWS", "AKIAIOSFODNN7PLANTED"),
    _text("GitHub", "ghp_" + "a1B2" * 9),
    _text("Slack", "xoxb-123456789012-abcdefPLANTED"),
    _text("Stripe", "sk_" + "live_" + "4eC39HqLyjWDarjtPLANTED"),
    _text("OpenAI", "sk-proj-" + "T3BlbkFJ" * 4),
    _text("Google", "AIza" + "SyPLANTED" * 4),
    PlantedSecret("PEM", "MIIEplantedplantedplantedplanted", {"text": f"Key:\n{PEM}\n"}),
    _text("card", "4111 1111 1111 1111"),
    PlantedSecret("card as a number", "5500005555555559", {"amount_of": 5500005555555559}),
    _text("SSN", "219-09-9999"),
    _text("IBAN", "DE89 3704 0044 0532 0130 00"),
    _text("cookie", "planted-cookie-1", "Cookie: theme=dark; sid={}"),
    _text("query", "planted-query-1", "https://api.example.org/v1?api_key={}&page=2"),
    _text("option of curl", "planted-curl-1", "curl -s -u ada:{} https://h"),
    PlantedSecret(
        "argument of curl", "planted-argv-1", {"argv": ["curl", "-u", "ada:planted-argv-1"]}
    ),
    PlantedSecret(
        "program and arguments",
        "planted-args-1",
        {"command": "docker", "args": ["login", "-u", "ada", "-p", "planted-args-1"]},
    ),
    _text("word", "planted-word-1", "login ada password {}"),
    _text("YAML, the line below", "planted-yaml-1", "\ndb:\n  password:\n    {}\n"),
    _text("YAML, a block", "planted-block-1 x", "\napiKey: |\n  {}\nuser: ada\n"),
    _text("HTML", "planted-html-1", "<pre>&quot;password&quot;: &quot;{}&quot;</pre>"),
    _text("percent escapes", "planted-escape-1", "a=password%3D{}%26user%3Dada"),
    _text("percent escapes of JSON", "planted-json-1", "?q=%7B%22api_key%22%3A%22{}%22%7D"),
    _text(
        "JSON in base64",
        base64.b64encode(b'{"user":"ada","password":"planted-base64"}').decode()[20:50],
        base64.b64encode(b'{"user":"ada","password":"planted-base64"}').decode().join("[]"),
    ),
    _text("IBAN in lower case", "gb82west12345698765432"),
    _text("card with dots", "4111.1111.1111.1111"),
    _text("Discord", "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs"),
    _text("Databricks", "dapi" + "0123456789abcdef" * 2),
    _text("Azure AD", "abc8Q~" + "planted_Azure-Secret" + "x" * 14),
    _text("New Relic", "NRAK-" + "PLANTED" * 3 + "ABCDEF"),
    _text("variable", "planted-env-1", "export AWS_SECRET_ACCESS_KEY={}"),
)
