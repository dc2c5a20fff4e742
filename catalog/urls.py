"""Addresses of the catalog's pages.

A tool may have any name, so nothing else lives directly under tools/: what is not a tool has two
parts, the second of which is no act upon a tool.
"""

from django.urls import URLPattern, path

from catalog import views

urlpatterns: list[URLPattern] = [
    path("tools", views.tools, name="tools"),
    path("tools/custom/add", views.add, name="tool-add"),
    path("tools/selected/change", views.bulk, name="tools-bulk"),
    path("tools/<str:public_name>", views.tool, name="tool"),
    path("tools/<str:public_name>/override", views.override, name="tool-override"),
    path("tools/<str:public_name>/policy", views.policy, name="tool-policy"),
    path("tools/<str:public_name>/hold", views.hold, name="tool-hold"),
    path("tools/<str:public_name>/release", views.release, name="tool-release"),
    path("tools/<str:public_name>/approve", views.approve, name="tool-approve"),
    path("tools/<str:public_name>/keep-old", views.keep_old, name="tool-keep-old"),
    path("tools/<str:public_name>/edit", views.edit, name="tool-edit"),
    path("tools/<str:public_name>/delete", views.delete, name="tool-delete"),
    path("groups", views.groups, name="groups"),
    path("groups/<path:group_id>", views.group, name="group"),
    path("audit", views.audit_log, name="audit"),
]
