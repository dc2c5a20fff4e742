"""URL routes of the project. Pages have no trailing slash."""

from django.urls import URLPattern, URLResolver, include, path

from toolcrib.accounts import views as account_views
from toolcrib.api import api
from toolcrib.notifications import views as notification_views
from toolcrib.pages import command_palette, error_views, overview, settings_views, style_guide
from toolcrib.runtime import live_updates, metrics_api

urlpatterns: list[URLPattern | URLResolver] = [
    path("", overview.overview, name="overview"),
    path("sign-in", account_views.SignIn.as_view(), name="sign-in"),
    path("sign-out", account_views.SignOut.as_view(), name="sign-out"),
    path("setup/<str:code>", account_views.setup, name="setup"),
    path("join/<str:uid>/<str:token>", account_views.join, name="join"),
    path("theme", account_views.theme, name="theme"),
    path("palette", command_palette.palette, name="palette"),
    path("settings", settings_views.first_section, name="settings"),
    path("settings/people", account_views.people_list, name="people"),
    path(
        "settings/people/<int:person_id>/<str:act>",
        account_views.change_person,
        name="person-change",
    ),
    path("settings/masking", settings_views.masking, name="settings-masking"),
    path("settings/notifications", notification_views.notifications, name="notifications"),
    path(
        "settings/notifications/<int:webhook_id>/<str:act>",
        notification_views.change_webhook,
        name="webhook-change",
    ),
    path("settings/prices", settings_views.prices, name="settings-prices"),
    path("settings/about", settings_views.about_page, name="about"),
    path("settings/password", account_views.change_password, name="password"),
    path("settings/profile", settings_views.profile, name="profile"),
    path("settings/<str:name>", settings_views.section, name="settings-section"),
    path("patterns/", style_guide.patterns, name="patterns"),
    path("live", live_updates.live, name="live"),
    path("livez", error_views.livez, name="livez"),
    path("metrics", metrics_api.metrics_page, name="metrics"),
    path("readyz", error_views.readyz, name="readyz"),
    path("", include("servers.urls")),
    path("", include("catalog.urls")),
    path("", include("sessions_app.urls")),
    path("api/v1/", api.urls),
]

handler400 = "toolcrib.pages.error_views.bad_request"
handler403 = "toolcrib.pages.error_views.forbidden"
handler404 = "toolcrib.pages.error_views.not_found"
handler500 = "toolcrib.pages.error_views.server_error"
