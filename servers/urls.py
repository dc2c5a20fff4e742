"""URLs of the server pages. Fixed paths come first: add, export and bulk are reserved slugs."""

from django.urls import URLPattern, path

from servers.web import import_views, settings_views, views

urlpatterns: list[URLPattern] = [
    path("servers", views.servers, name="servers"),
    path("servers/add", import_views.source, name="server-add"),
    path("servers/add/check", import_views.check, name="server-add-check"),
    path("servers/add/connect", import_views.connect, name="server-add-connect"),
    path("servers/add/progress", import_views.progress, name="server-add-progress"),
    path("servers/export", views.export, name="server-export"),
    path("servers/bulk", views.bulk, name="servers-bulk"),
    path("servers/<slug:slug>", views.server, name="server"),
    path("servers/<slug:slug>/tools", views.tools, name="server-tools"),
    path("servers/<slug:slug>/syncs", views.syncs, name="server-syncs"),
    path("servers/<slug:slug>/status", views.status, name="server-status"),
    path("servers/<slug:slug>/sync", views.sync, name="server-sync"),
    path("servers/<slug:slug>/test", views.test, name="server-test"),
    path("servers/<slug:slug>/enable", views.enable, name="server-enable"),
    path("servers/<slug:slug>/disable", views.disable, name="server-disable"),
    path("servers/<slug:slug>/settings", settings_views.settings, name="server-settings"),
    path("servers/<slug:slug>/connection", settings_views.connection, name="server-edit"),
    path("servers/<slug:slug>/credentials", settings_views.credentials, name="server-credentials"),
    path("servers/<slug:slug>/delete", settings_views.delete, name="server-delete"),
]
