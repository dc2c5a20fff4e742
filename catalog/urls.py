"""URL routes of the catalog's pages.

A tool may have any name, so nothing else lives directly under tools/: other pages have two path
segments, and the second is not an action on a tool. The same applies to groups/.
"""

from django.urls import URLPattern, path

from catalog.approvals import views as approval_views
from catalog.audit import views as audit_views
from catalog.groups import board_views
from catalog.groups import views as group_views
from catalog.hints import views as hint_views
from catalog.tools import views

urlpatterns: list[URLPattern] = [
    path("tools", views.tools, name="tools"),
    path("tools/custom/add", views.add, name="tool-add"),
    path("tools/selected/change", views.bulk, name="tools-bulk"),
    path("tools/<str:public_name>", views.tool, name="tool"),
    path("tools/<str:public_name>/override", views.override, name="tool-override"),
    path("tools/<str:public_name>/parameters", views.parameters, name="tool-parameters"),
    path("tools/<str:public_name>/access", views.access, name="tool-access"),
    path("tools/<str:public_name>/policy", views.policy, name="tool-policy"),
    path("tools/<str:public_name>/storage", views.storage, name="tool-storage"),
    path("tools/<str:public_name>/read-only", views.read_only, name="tool-read-only"),
    path("tools/<str:public_name>/examples", views.examples, name="tool-examples"),
    path("tools/<str:public_name>/hold", views.hold, name="tool-hold"),
    path("tools/<str:public_name>/release", views.release, name="tool-release"),
    path("tools/<str:public_name>/approve", views.decide, {"act": "approve"}, "tool-approve"),
    path("tools/<str:public_name>/keep-old", views.decide, {"act": "keep-old"}, "tool-keep-old"),
    path("tools/<str:public_name>/edit", views.edit, name="tool-edit"),
    path("tools/<str:public_name>/delete", views.delete, name="tool-delete"),
    path("tools/<str:public_name>/hints", hint_views.add, name="tool-hints"),
    path(
        "tools/<str:public_name>/hints/<int:hint_id>/remove",
        hint_views.remove,
        name="tool-hint-remove",
    ),
    path(
        "tools/<str:public_name>/hints/<int:hint_id>/edit", hint_views.edit, name="tool-hint-edit"
    ),
    path(
        "tools/<str:public_name>/hints/<int:hint_id>/accept",
        hint_views.accept,
        name="tool-hint-accept",
    ),
    path("search/hints", hint_views.hints, name="hints"),
    path("search/hints/import", hint_views.import_lines, name="hints-import"),
    path("search/hints/export.jsonl", hint_views.export, name="hints-export"),
    path("groups", group_views.groups, name="groups"),
    path("groups/all/create", group_views.create, name="group-create"),
    path("groups/all/order", group_views.order, name="groups-order"),
    path("groups/all/compare", group_views.compare, name="groups-compare"),
    path("groups/all/add-tools", board_views.assign_any, name="groups-add-tools"),
    path("groups/all/remove-tools", board_views.remove_any, name="groups-remove-tools"),
    path("groups/undo/<int:entry_id>", board_views.undo, name="group-undo"),
    path("groups/<str:group_id>", group_views.group, name="group"),
    path("groups/<str:group_id>/edit", group_views.edit, name="group-edit"),
    path("groups/<str:group_id>/describe", group_views.describe, name="group-describe"),
    path("groups/<str:group_id>/assign", board_views.assign, name="group-assign"),
    path("groups/<str:group_id>/move", board_views.move, name="group-move"),
    path("groups/<str:group_id>/changes", group_views.changes, name="group-changes"),
    path("groups/<str:group_id>/remove", board_views.remove, name="group-remove"),
    path("groups/<str:group_id>/order", board_views.order_members, name="group-order"),
    path("groups/<str:group_id>/preload", board_views.preload, name="group-preload"),
    path("groups/<str:group_id>/delete", group_views.delete, name="group-delete"),
    path("approvals", approval_views.approval_list, name="approvals"),
    path("approvals/bulk", approval_views.decide_many, name="approvals-bulk"),
    path("approvals/<str:public_name>/undo", approval_views.undo, name="approval-undo"),
    path("approvals/<str:public_name>/<str:act>", approval_views.decide, name="approval-decide"),
    path("audit", audit_views.audit_log, name="audit"),
    path("audit/export.csv", audit_views.export, {"extension": "csv"}, "audit-csv"),
    path("audit/export.json", audit_views.export, {"extension": "json"}, "audit-json"),
]
