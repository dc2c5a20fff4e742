"""Views for sign-in, setup, password links, theme and the list of people."""

from collections.abc import Callable
from functools import partial
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView, LogoutView, PasswordChangeView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse, reverse_lazy
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from catalog.audit import Actor
from toolcrib.accounts import invitations, sign_in_limits, sign_ins
from toolcrib.accounts.sign_in_limits import SignInLimited
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.request import redirect_next
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    role_of,
    role_required,
    stored_role,
    viewer_required,
)
from toolcrib.pages.settings_views import side

BACKEND = "django.contrib.auth.backends.ModelBackend"


class SignInForm(AuthenticationForm):
    error_messages = {
        "invalid_login": "Incorrect e-mail or password.",
        "inactive": "Incorrect e-mail or password.",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].label = "E-mail or name"

    def clean_username(self) -> str:
        return str(self.cleaned_data["username"]).strip().lower()

    def clean(self) -> dict[str, Any]:
        """Check the password, within the limits of attempts. Raises SignInLimited."""
        name = self.cleaned_data.get("username")
        if self.request is not None and name and self.cleaned_data.get("password"):
            sign_in_limits.count_attempt(self.request, name)
        return super().clean()


@method_decorator([login_not_required, sensitive_post_parameters(), never_cache], name="dispatch")
class SignIn(LoginView):
    template_name = "toolcrib/accounts/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return super().post(request, *args, **kwargs)
        except SignInLimited as error:
            sign_ins.record_failure(request, request.POST.get("username", "").strip().lower())
            return locked_out(request, error)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        name = form.cleaned_data["username"]
        sign_in_limits.refund_attempt(self.request, name)
        response = super().form_valid(form)
        sign_in_limits.remember_device(self.request, response, name)
        sign_ins.record_sign_in(self.request, form.get_user())
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(**kwargs) | {"setup_open": invitations.setup_open()}

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        if "username" in form.cleaned_data and "password" in form.cleaned_data:
            sign_ins.record_failure(self.request, form.cleaned_data["username"])
        return super().form_invalid(form)


class SignOut(LogoutView):
    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        sign_ins.record_sign_out(request)
        return super().post(request, *args, **kwargs)


class PasswordForm(forms.Form):
    password = forms.CharField(
        label="Password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 12 characters.",
    )


class SetupForm(PasswordForm):
    field_order = ["email", "password"]
    email = forms.EmailField(
        label="E-mail",
        widget=forms.EmailInput(attrs={"autocomplete": "username", "autofocus": True}),
    )


@login_not_required
@sensitive_post_parameters()
@never_cache
def setup(request: HttpRequest, code: str) -> HttpResponse:
    """Create the first admin, once."""
    if not invitations.is_valid_setup_code(code):
        if not invitations.setup_open():
            return redirect("sign-in")
        hint = "Toolcrib prints the current link each time it starts."
        raise NotFound("Invalid setup link.", hint=hint)
    form = SetupForm(request.POST or None)
    return _password_page(request, "setup", form, invitations.set_up)


@login_not_required
@sensitive_post_parameters()
@never_cache
def join(request: HttpRequest, uid: str, token: str) -> HttpResponse:
    """Set a password through an invitation or password link."""
    user = invitations.find_link_user(uid, token)
    if user is None:
        raise NotFound(
            "This link was already used or has expired.",
            hint="Ask an admin for a new link: manage.py reset_password NAME.",
        )
    form = PasswordForm(request.POST or None)
    return _password_page(request, "invite", form, partial(invitations.set_password, user), user)


def _password_page(
    request: HttpRequest,
    template: str,
    form: PasswordForm,
    save: Callable[..., User],
    person: User | None = None,
) -> HttpResponse:
    """Render a form that sets a password; when it is saved, sign the person in."""
    if form.is_valid():
        try:
            user = save(**form.cleaned_data)
        except Invalid as error:
            form.add_error("password", error.message)
        else:
            login(request, user, backend=BACKEND)
            sign_ins.record_sign_in(request, user)
            return redirect("overview")
    context = {"form": form, "person": person}
    status = 422 if form.is_bound else 200
    return render(request, f"toolcrib/accounts/{template}.html", context, status=status)


class OwnPasswordForm(PasswordChangeForm):
    """Django's form, with our rule for passwords said beside the field."""

    def __init__(self, user: User, *args: Any, **kwargs: Any) -> None:
        super().__init__(user, *args, **kwargs)
        self.fields["old_password"].label = "Current password"
        self.fields["new_password1"].help_text = "At least 12 characters."
        self.fields["new_password2"].label = "New password again"
        self.fields["new_password2"].help_text = ""


class ChangePassword(PasswordChangeView):
    """Change the reader's own password; other browsers are signed out by Django."""

    template_name = "toolcrib/accounts/password.html"
    form_class = OwnPasswordForm
    success_url = reverse_lazy("profile")

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        name = request.user.get_username()
        try:
            sign_in_limits.count_attempt(request, name)
        except SignInLimited as error:
            return locked_out(request, error)
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        sign_in_limits.refund_attempt(self.request, self.request.user.get_username())
        invitations.record_own_password(form.user)
        messages.success(self.request, "Changed your password. Other browsers are signed out.")
        return response

    def form_invalid(self, form: Any) -> HttpResponse:
        return self.render_to_response(self.get_context_data(form=form), status=422)

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(**kwargs) | {"side": side("profile")}


change_password = viewer_required(
    sensitive_post_parameters()(never_cache(ChangePassword.as_view()))
)


@login_not_required
@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Store the theme in a cookie, so that the server renders it."""
    selected = request.POST.get("theme") or request.GET.get("theme", "")
    if selected not in ("light", "dark", "auto"):
        raise Invalid("The theme must be light, dark or auto.")
    response = redirect_next(request, reverse("overview"))
    response.set_cookie("theme", selected, max_age=31_536_000, samesite="Lax", httponly=False)
    return response


ROLES = {role.label: role for role in (Role.OPERATOR, Role.VIEWER, Role.ADMIN, Role.OUTSIDER)}
ROLE_DESCRIPTIONS = {
    "operator": "operator: reads everything and approves",
    "viewer": "viewer: reads pages and figures, no payloads, exports or decisions",
    "admin": "admin: edits everything",
    "outsider": "outsider: no access",
}
MAX_PEOPLE = 500


class InviteForm(forms.Form):
    name = forms.CharField(
        label="E-mail or name",
        max_length=150,
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "off"}),
    )
    role = forms.ChoiceField(label="Role", choices=list(ROLE_DESCRIPTIONS.items()))


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
@never_cache
def people_list(request: HttpRequest) -> HttpResponse:
    """List the people; a POST invites a person and shows the link once."""
    form = InviteForm(request.POST if request.method == "POST" else None)
    if not form.is_bound:
        return _people_page(request, form)
    if form.is_valid():
        role = ROLES[form.cleaned_data["role"]]
        try:
            person = invitations.invite(form.cleaned_data["name"], role, actor=actor_of(request))
        except ToolcribError as error:
            form.add_error("name", error.message)
        else:
            return _people_page(request, InviteForm(), linked=person)
    return _people_page(request, form)


def _people_page(
    request: HttpRequest, form: InviteForm, linked: User | None = None
) -> HttpResponse:
    rows = list(User.objects.select_related("viewer").order_by("username")[: MAX_PEOPLE + 1])
    context = {
        "side": side("people"),
        "people": [
            {
                "person": user,
                "role": stored_role(user).label,
                "joined": user.has_usable_password(),
                "is_self": user.pk == request.user.pk,
            }
            for user in rows[:MAX_PEOPLE]
        ],
        "more": len(rows) > MAX_PEOPLE,
        "roles": list(ROLES),
        "form": form if role_of(request.user) == Role.ADMIN else None,
        "linked": linked,
        "link": invitations.password_link(linked) if linked else "",
    }
    status = 422 if form.errors else 200
    return render(request, "toolcrib/accounts/people.html", context, status=status)


@require_POST
@admin_required
@never_cache
def change_person(request: HttpRequest, person_id: int, act: str) -> HttpResponse:
    """Change a person's role, enable or disable them, or create a password link."""
    person = User.objects.filter(pk=person_id).first()
    if person is None:
        raise NotFound("Person not found.", hint="Reload the list.")
    actor = actor_of(request)
    try:
        if act == "link":
            invitations.record_password_reset(person.username, actor=actor)
            return _people_page(request, InviteForm(), linked=person)
        message = _apply_change(person, act, request.POST.get("role", ""), actor)
    except Conflict as error:
        messages.error(request, error.sentence)
    else:
        messages.success(request, message)
    return redirect("people")


def _apply_change(person: User, act: str, role: str, actor: Actor) -> str:
    """Change a role, or enable or disable a person; return the message to show."""
    if act == "role":
        if role not in ROLES:
            raise Invalid(f"The role must be one of: {', '.join(ROLES)}.")
        invitations.change_role(person, ROLES[role], actor=actor)
        return f"{person.username} now has the role {role}."
    if act not in ("enable", "disable"):
        raise NotFound("Unknown action.", hint="Use role, enable, disable or link.")
    invitations.set_active(person, act == "enable", actor=actor)
    return f"{'Enabled' if act == 'enable' else 'Disabled'} {person.username}."


def locked_out(request: HttpRequest, error: SignInLimited) -> HttpResponse:
    """Return the lockout page. It is the same for existing and unknown names."""
    context = {"message": error.message, "hint": error.hint}
    response = render(request, "toolcrib/accounts/locked_out.html", context, status=error.status)
    response["Retry-After"] = str(error.details["retry_after"])
    return response
