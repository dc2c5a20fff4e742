"""Every address. Pages have no trailing slash."""

from django.contrib.auth.views import LogoutView
from django.urls import URLPattern, URLResolver, include, path

from toolcrib.accounts import views as people_views
from toolcrib.api import api
from toolcrib.pages import command_palette as palette
from toolcrib.pages import error_views as system_views
from toolcrib.pages import settings_views, views
from toolcrib.pages import style_guide as patterns

urlpatterns: list[URLPattern | URLResolver] = [
    path("", views.overview, name="overview"),
    path("sign-in", people_views.SignIn.as_view(), name="sign-in"),
    path("sign-out", LogoutView.as_view(), name="sign-out"),
    path("setup/<str:code>", people_views.setup, name="setup"),
    path("join/<str:uid>/<str:token>", people_views.join, name="join"),
    path("theme", people_views.theme, name="theme"),
    path("palette", palette.palette, name="palette"),
    path("settings", settings_views.first, name="settings"),
    path("settings/people", people_views.people_list, name="people"),
    path(
        "settings/people/<int:person_id>/<str:act>",
        people_views.change_person,
        name="person-change",
    ),
    path("settings/about", settings_views.about_page, name="about"),
    path("settings/profile", settings_views.profile, name="profile"),
    path("settings/<str:name>", settings_views.section, name="settings-section"),
    path("patterns/", patterns.patterns, name="patterns"),
    path("livez", system_views.livez, name="livez"),
    path("readyz", system_views.readyz, name="readyz"),
    path("", include("servers.urls")),
    path("", include("catalog.urls")),
    path("", include("sessions_app.urls")),
    path("api/v1/", api.urls),
]

handler400 = "toolcrib.pages.error_views.bad_request"
handler403 = "toolcrib.pages.error_views.forbidden"
handler404 = "toolcrib.pages.error_views.not_found"
handler500 = "toolcrib.pages.error_views.server_error"
