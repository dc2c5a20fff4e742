"""Django settings, read from the environment. The tables in docs/operations.md list them.

Embedded mode, the default, needs no service and no variable. Production mode is enabled by
DATABASE_URL and REDIS_URL, and does not start with guessable keys, wildcard hosts or DEBUG.
"""

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from toolcrib.config import environment as env
from toolcrib.config import installation_keys
from toolcrib.config.databases import database_from_url, sqlite_database

BASE_DIR = Path(__file__).resolve().parent.parent
# A wheel has templates and static files inside this package; a clone has manage.py beside it.
IS_CLONE = (BASE_DIR / "manage.py").is_file()
FILES_DIR = BASE_DIR if IS_CLONE else BASE_DIR / "toolcrib"
VERSION = "0.1.0"

# --- Deployment mode --------------------------------------------------------------------------

DATABASE_URL = env.secret("DATABASE_URL")
REDIS_URL = env.secret("REDIS_URL")
EMBEDDED = not (DATABASE_URL or REDIS_URL)
if not EMBEDDED and not (DATABASE_URL and REDIS_URL):
    missing = "REDIS_URL" if DATABASE_URL else "DATABASE_URL"
    raise ImproperlyConfigured(
        f"{missing} is not set. Production needs DATABASE_URL and REDIS_URL; set neither to run "
        "embedded on SQLite."
    )

DATA_DIR = env.path("TOOLCRIB_DATA") or (BASE_DIR / "var" if IS_CLONE else env.user_data_dir())
if EMBEDDED:
    with installation_keys.writing_to(DATA_DIR):
        installation_keys.make_private_dir(DATA_DIR)
        # SQLite creates the -wal and -shm files with the same mode.
        installation_keys.make_private_file(DATA_DIR / "toolcrib.sqlite3")

DEBUG = env.flag("DEBUG")
BIND = env.text("TOOLCRIB_BIND", "127.0.0.1")
PORT = env.number("PORT", 8000, low=1, high=65535)
WEB_WORKERS = env.number("WEB_WORKERS", 1, low=1, high=64)
# Seconds that calls in progress get to finish when Toolcrib stops.
DRAIN = env.number("TOOLCRIB_DRAIN", 2 if EMBEDDED else 8, low=1, high=300)

# --- Keys and hosts ---------------------------------------------------------------------------

if EMBEDDED:
    SECRET_KEY = env.secret("TOOLCRIB_SECRET_KEY") or installation_keys.local_key(
        DATA_DIR / "secret.key"
    )
    ENCRYPTION_KEYS = installation_keys.split_keys(env.secret("TOOLCRIB_ENCRYPTION_KEYS"))
    if not ENCRYPTION_KEYS[0]:
        ENCRYPTION_KEYS = [installation_keys.local_key(DATA_DIR / "encryption.key")]
    ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", *env.words("TOOLCRIB_HOSTS")]
else:
    SECRET_KEY = installation_keys.require_key(
        "TOOLCRIB_SECRET_KEY", env.secret("TOOLCRIB_SECRET_KEY")
    )
    ENCRYPTION_KEYS = [
        installation_keys.require_key("TOOLCRIB_ENCRYPTION_KEYS", key)
        for key in installation_keys.split_keys(env.secret("TOOLCRIB_ENCRYPTION_KEYS"))
    ]
    ALLOWED_HOSTS = env.words("TOOLCRIB_HOSTS")
    if not ALLOWED_HOSTS or any(host == "*" or host.startswith(".") for host in ALLOWED_HOSTS):
        raise ImproperlyConfigured(
            "TOOLCRIB_HOSTS must list the exact host names people and agents use, separated by "
            "commas. Wildcards are not allowed."
        )
    if DEBUG:
        raise ImproperlyConfigured("DEBUG must not be set in production: it exposes settings.")
if "*" in ALLOWED_HOSTS:
    raise ImproperlyConfigured("TOOLCRIB_HOSTS must not contain *: list the host names.")

# The seal of the audit chain is kept outside the database: in a file, or in Redis if empty.
AUDIT_SEAL = env.text("TOOLCRIB_AUDIT_SEAL") or (str(DATA_DIR / "audit.seal") if EMBEDDED else "")
AUDIT_SINK = env.text("TOOLCRIB_AUDIT_SINK")  # a file, or - for standard output

# --- Monitoring -------------------------------------------------------------------------------

METRICS = env.flag("TOOLCRIB_METRICS")
METRICS_TOKEN = env.secret("TOOLCRIB_METRICS_TOKEN")  # without it, only loopback may read them

# Spans are sent by the SDK of OpenTelemetry, which reads its own variables, OTEL_….
TRACING = env.flag("TOOLCRIB_TRACING")
if TRACING and not (find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter")):
    raise ImproperlyConfigured(
        "TOOLCRIB_TRACING needs the SDK of OpenTelemetry: pip install 'toolcrib[tracing]'."
    )
# Where people find the traces of a session: a URL with {session_id}.
TRACE_URL = env.text("TOOLCRIB_TRACE_URL")
if TRACE_URL and not (
    TRACE_URL.startswith(("https://", "http://")) and "{session_id}" in TRACE_URL
):
    raise ImproperlyConfigured(
        "TOOLCRIB_TRACE_URL must start with https:// or http:// and contain {session_id}."
    )

# E-mail for notifications. Without a host, none is sent.
EMAIL_HOST = env.text("TOOLCRIB_EMAIL_HOST")
EMAIL_PORT = env.number("TOOLCRIB_EMAIL_PORT", 587, low=1, high=65535)
EMAIL_HOST_USER = env.text("TOOLCRIB_EMAIL_USER")
EMAIL_HOST_PASSWORD = env.secret("TOOLCRIB_EMAIL_PASSWORD")
EMAIL_USE_SSL = EMAIL_PORT == 465
EMAIL_USE_TLS = env.flag("TOOLCRIB_EMAIL_TLS", True) and not EMAIL_USE_SSL
EMAIL_TIMEOUT = 10
EMAIL_FROM = DEFAULT_FROM_EMAIL = env.text("TOOLCRIB_EMAIL_FROM", "toolcrib@localhost")

# --- Allowed programs and networks ------------------------------------------------------------

# stdio runs programs on this machine. Embedded and bound to loopback, an admin may allow them;
# elsewhere the operator of the machine must enable it here.
LOOPBACK = BIND in {"127.0.0.1", "::1", "localhost"}
ALLOW_STDIO = env.flag("TOOLCRIB_ALLOW_STDIO", EMBEDDED and LOOPBACK)
# How programs are restricted (servers/transports/sandbox.py).
STDIO_LANDLOCK = env.flag("TOOLCRIB_STDIO_LANDLOCK", True)
STDIO_USER = env.user("TOOLCRIB_STDIO_USER")
SECRET_FILES = env.secret_files()
# Networks, besides the public internet, on which servers may be, as CIDRs.
ALLOWED_NETWORKS = env.words(
    "TOOLCRIB_ALLOWED_NETWORKS", "127.0.0.0/8,::1/128" if EMBEDDED and LOOPBACK else ""
)
# Hidden, bidirectional and control characters in texts of definitions that agents read.
REMOVE_HIDDEN_CHARACTERS = env.flag("TOOLCRIB_REMOVE_HIDDEN_CHARACTERS", True)
ALLOW_PLAIN_HTTP = env.flag("TOOLCRIB_ALLOW_PLAIN_HTTP", EMBEDDED)

# Whether anybody may read the description of the API, or only people and agents with access.
PUBLIC_API_DOCS = env.flag("TOOLCRIB_PUBLIC_API_DOCS", EMBEDDED and LOOPBACK)

# --- Limits and timeouts (docs/operations.md) -------------------------------------------------

MAX_TOOLS = env.number("TOOLCRIB_MAX_TOOLS", 10_000, low=1)
MAX_PAGES = env.number("TOOLCRIB_MAX_PAGES", 100, low=1)
MAX_DEFINITION_BYTES = env.number("TOOLCRIB_MAX_DEFINITION_BYTES", 64 * 1024, low=1024)
MAX_DESCRIPTION_BYTES = env.number("TOOLCRIB_MAX_DESCRIPTION_BYTES", 32 * 1024, low=256)
MAX_LISTING_BYTES = env.number("TOOLCRIB_MAX_LISTING_BYTES", 64 * 1024 * 1024, low=1024)
# Of new definitions of one server per day; a first list of the largest size fits.
DEFINITION_BYTES = env.number("TOOLCRIB_DEFINITION_BYTES", 128 * 1024 * 1024, low=1024)
MAX_MESSAGE_BYTES = env.number("TOOLCRIB_MAX_MESSAGE_BYTES", 10 * 1024 * 1024, low=1024)
MAX_BODY_BYTES = env.number("TOOLCRIB_MAX_BODY_BYTES", 1024 * 1024, low=1024)
STDERR_BYTES = env.number("TOOLCRIB_STDERR_BYTES", 64 * 1024, low=1024)
MAX_PROCESSES = env.number("TOOLCRIB_MAX_PROCESSES", 2_000, low=20)
MAX_PROGRAM_MEMORY = env.number("TOOLCRIB_MAX_PROGRAM_MEMORY", 4096)  # MB; 0 is no limit
CONNECT_TIMEOUT = env.number("TOOLCRIB_CONNECT_TIMEOUT", 10, low=1)
HANDSHAKE_TIMEOUT = env.number("TOOLCRIB_HANDSHAKE_TIMEOUT", 20, low=1)
# A result is one message, so the message limit applies.
MAX_RESULT_BYTES = MAX_MESSAGE_BYTES
MAX_CONTENT_ITEMS = env.number("TOOLCRIB_MAX_CONTENT_ITEMS", 1000, low=1)
CALL_TIMEOUT = env.number("TOOLCRIB_CALL_TIMEOUT", 60, low=1, high=900)
CALLS_IN_FLIGHT = env.number("TOOLCRIB_CALLS_IN_FLIGHT", 8, low=1)
CALLS_QUEUED = env.number("TOOLCRIB_CALLS_QUEUED", 16, low=0)
IDLE_DISCONNECT = env.number("TOOLCRIB_IDLE_DISCONNECT", 300, low=1)
SESSION_DISCONNECT = env.number("TOOLCRIB_SESSION_DISCONNECT", 1800, low=1)
SESSION_CONNECTIONS = env.number("TOOLCRIB_SESSION_CONNECTIONS", 100, low=1)
BODY_TIMEOUT = env.number("TOOLCRIB_BODY_TIMEOUT", 30, low=1)
# Connections of clients. The limit of open files may lower the first (runtime/http_protocol.py).
MAX_SOCKETS = env.number("TOOLCRIB_MAX_SOCKETS", 10_000, low=10)
SOCKETS_PER_ADDRESS = env.number("TOOLCRIB_SOCKETS_PER_ADDRESS", 256, low=1)
MAX_STREAMS = env.number("TOOLCRIB_MAX_STREAMS", 100, low=1)
MAX_CONNECTIONS = env.number("TOOLCRIB_MAX_CONNECTIONS", 100, low=1)
SYNC_TIMEOUT = env.number("TOOLCRIB_SYNC_TIMEOUT", 60, low=1)
SYNC_GAP = env.number("TOOLCRIB_SYNC_GAP", 5, low=1)
SYNC_POLL = env.number("TOOLCRIB_SYNC_POLL", 15 * 60, low=5)
SYNC_WORKERS = env.number("TOOLCRIB_SYNC_WORKERS", 6, low=4)
# Semantic search; without it, search is keyword only. The model is prepared once in its directory.
EMBEDDINGS = env.flag("TOOLCRIB_EMBEDDINGS", True)
MODELS_DIR = Path(env.text("TOOLCRIB_MODELS") or DATA_DIR / "models").expanduser().resolve()
# A language model that writes search hints for new tools: the full URL of its OpenAI- or
# Anthropic-compatible endpoint. Without it, no tool text leaves this machine for that purpose.
HINTS_URL = env.text("TOOLCRIB_HINTS_URL")
HINTS_MODEL = env.text("TOOLCRIB_HINTS_MODEL")
HINTS_KEY = env.secret("TOOLCRIB_HINTS_KEY")
if HINTS_URL and not HINTS_MODEL:
    raise ImproperlyConfigured("TOOLCRIB_HINTS_MODEL must name the model of TOOLCRIB_HINTS_URL.")
if HINTS_URL and not HINTS_URL.startswith(("https://", "http://")):
    raise ImproperlyConfigured("TOOLCRIB_HINTS_URL must start with https:// or http://.")

# A function for `extract` in scripts: package.module.function, of a value and a JSON Schema.
EXTRACT = env.text("TOOLCRIB_EXTRACT")
if EXTRACT and "." not in EXTRACT:
    raise ImproperlyConfigured("TOOLCRIB_EXTRACT must be a path like package.module.function.")

SESSION_IDLE_SECONDS = env.number("TOOLCRIB_SESSION_IDLE", 24 * 3600, low=60)
HELD_CALL_SECONDS = env.number("TOOLCRIB_HELD_CALL_SECONDS", 24 * 3600, low=1, high=24 * 3600)
MAX_HELD_CALLS = env.number("TOOLCRIB_MAX_HELD_CALLS", 100, low=1)
KEEP_PAYLOADS_DAYS = env.number("TOOLCRIB_KEEP_PAYLOADS_DAYS", 30, low=1)
KEEP_SESSIONS_DAYS = env.number("TOOLCRIB_KEEP_SESSIONS_DAYS", 365, low=1)
# Variables set here cannot be changed in the dashboard (catalog/preferences.py).
FROM_ENVIRONMENT = env.set_variables()

# --- Django -----------------------------------------------------------------------------------

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.humanize",
    "django.contrib.staticfiles",
    "django_htmx",
    "lucide",
    "csp",
    "ninja",
    "toolcrib",
    "catalog",
    "servers",
    "sessions_app",
]

MIDDLEWARE = [
    "toolcrib.middleware.request_id",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "toolcrib.middleware.session_age",
    "toolcrib.middleware.display_preferences",
    "toolcrib.middleware.SignInRequired",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "toolcrib.middleware.PageErrors",
]
# The API uses no cookies, so it needs no session and no CSRF check.
API_MIDDLEWARE = ["toolcrib.middleware.request_id"]

ROOT_URLCONF = "toolcrib.urls"
ASGI_APPLICATION = "toolcrib.asgi.application"
APPEND_SLASH = False

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [FILES_DIR / "templates"],
        "APP_DIRS": False,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "toolcrib.pages.navigation.context",
            ],
            "loaders": [
                (
                    "django.template.loaders.cached.Loader",
                    [
                        "django.template.loaders.filesystem.Loader",
                        "django.template.loaders.app_directories.Loader",
                    ],
                )
            ],
            "builtins": ["toolcrib.templatetags.toolcrib", "toolcrib.templatetags.icons"],
        },
    }
]

DATABASES = {
    "default": sqlite_database(DATA_DIR) if EMBEDDED else database_from_url(DATABASE_URL),
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_I18N = False
USE_TZ = True

STATIC_URL = "/static/"
STATICFILES_DIRS = [FILES_DIR / "static"]
# Serve static files from their source directory, so that no collectstatic step is needed.
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

DATA_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES
FILE_UPLOAD_MAX_MEMORY_SIZE = MAX_BODY_BYTES

# --- Users and sessions -----------------------------------------------------------------------

LOGIN_URL = "sign-in"
SIGN_IN_PATH = "/sign-in"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "sign-in"
PASSWORD_HASHERS = ["toolcrib.config.password_hashers.BoundedArgon2"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": 12},
    },
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
PASSWORD_RESET_TIMEOUT = int(timedelta(days=3).total_seconds())

SESSION_IDLE = timedelta(minutes=30)
SESSION_ABSOLUTE = timedelta(hours=12)
SESSION_COOKIE_AGE = int(SESSION_ABSOLUTE.total_seconds())
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
CSRF_FAILURE_VIEW = "toolcrib.pages.error_views.csrf_failure"
CSRF_TRUSTED_ORIGINS = env.words("TOOLCRIB_ORIGINS")
# Pages of these origins may use /mcp and the API, with a key and never with cookies.
BROWSER_ORIGINS = env.words("TOOLCRIB_BROWSER_ORIGINS")
HTTPS = env.flag("TOOLCRIB_HTTPS", not EMBEDDED)
# Proxies whose X-Forwarded-For is used as the client's address, as CIDRs.
PROXIES = env.networks("TOOLCRIB_PROXIES")
PUBLIC_URL = env.text("TOOLCRIB_PUBLIC_URL").rstrip("/") or (
    f"http://localhost:{PORT}"
    if EMBEDDED
    else f"{'https' if HTTPS else 'http'}://{ALLOWED_HOSTS[0]}"
)
if HTTPS:
    SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = True
    SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = "__Host-session", "__Host-csrf"
    DEVICE_COOKIE_NAME = "__Host-device"
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = 31_536_000
else:
    SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = "toolcrib-session", "toolcrib-csrf"
    DEVICE_COOKIE_NAME = "toolcrib-device"
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "connect-src": [SELF],
        "font-src": [SELF],
        "form-action": [SELF],
        "base-uri": [NONE],
        "frame-ancestors": [NONE],
        "manifest-src": [SELF],
    }
}

# --- Logging ----------------------------------------------------------------------------------

LOG_LEVEL = env.text("TOOLCRIB_LOG_LEVEL", "INFO")
LOG_FILE = {
    "class": "toolcrib.config.log_formatters.PrivateLogFile",
    "formatter": "line",
    "filename": DATA_DIR / "toolcrib.log",
    "filters": ["repeats"],
    "maxBytes": 5_000_000,
    "backupCount": 3,
    "delay": True,
    "encoding": "utf-8",
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": "toolcrib.config.log_formatters.OneLineFormatter"}},
    "filters": {"repeats": {"()": "toolcrib.config.log_formatters.RepeatFilter"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "line",
            "filters": ["repeats"],
        },
        **({"file": LOG_FILE} if EMBEDDED else {}),
    },
    "root": {"handlers": ["stderr", *(["file"] if EMBEDDED else [])], "level": "WARNING"},
    "loggers": {
        **{
            name: {"level": LOG_LEVEL}
            for name in ("toolcrib", "catalog", "servers", "sessions_app")
        },
        # Rejected requests and the in-memory broker are not worth a log line.
        "django.request": {"level": "ERROR"},
        "kombu.connection": {"level": "ERROR"},
    },
}
