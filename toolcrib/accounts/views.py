"""Sign in, first setup, joining by link, theme; the list of people."""

from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from catalog.audit import Actor
from toolcrib.accounts import invitations
from toolcrib.lib.errors import Conflict, Invalid, NotFound, ToolcribError
from toolcrib.lib.roles import Role, actor_of, admin_required, operator_required, require, role_of
from toolcrib.pages.settings_views import side

BACKEND = "django.contrib.auth.backends.ModelBackend"


class SignInForm(AuthenticationForm):
    error_messages = {
        "invalid_login": "The name or the password is not right.",
        "inactive": "The name or the password is not right.",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].label = "E-mail or name"

    def clean_username(self) -> str:
        return str(self.cleaned_data["username"]).strip().lower()


@method_decorator([login_not_required, sensitive_post_parameters(), never_cache], name="dispatch")
class SignIn(LoginView):
    template_name = "toolcrib/accounts/sign_in.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(**kwargs) | {"setup_open": invitations.setup_open()}


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
    """Make the first admin, once."""
    if not invitations.right_setup_code(code):
        if not invitations.setup_open():
            return redirect("sign-in")
        raise NotFound(
            "This setup link is not right.",
            hint="The program prints the right one each time it starts.",
        )
    form = SetupForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            user = invitations.set_up(form.cleaned_data["email"], form.cleaned_data["password"])
        except Invalid as error:
            form.add_error("password", error.message)
        else:
            login(request, user, backend=BACKEND)
            return redirect("overview")
    return render(request, "toolcrib/accounts/setup.html", {"form": form}, status=_status(form))


@login_not_required
@sensitive_post_parameters()
@never_cache
def join(request: HttpRequest, uid: str, token: str) -> HttpResponse:
    """Choose a password by link."""
    user = invitations.person_of(uid, token)
    if user is None:
        raise NotFound(
            "This link was used or is too old.",
            hint="Ask an admin for a new one: manage.py reset_password NAME.",
        )
    form = PasswordForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            invitations.choose_password(user, form.cleaned_data["password"])
        except Invalid as error:
            form.add_error("password", error.message)
        else:
            login(request, User.objects.get(pk=user.pk), backend=BACKEND)
            return redirect("overview")
    return render(
        request,
        "toolcrib/accounts/invite.html",
        {"form": form, "person": user},
        status=_status(form),
    )


def _status(form: forms.Form) -> int:
    return 422 if form.is_bound else 200


@login_not_required
@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Keep the chosen theme in a cookie, so that the server paints it first."""
    chosen = request.POST.get("theme", "")
    if chosen not in ("light", "dark", "auto"):
        raise Invalid("A theme is light, dark or auto.")
    target = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()}):
        target = reverse("overview")
    response = HttpResponseRedirect(target)
    response.set_cookie("theme", chosen, max_age=31_536_000, samesite="Lax", httponly=False)
    return response


# --- The list of people -------------------------------------------------------------------------

ROLES = {role.word: role for role in (Role.OPERATOR, Role.ADMIN, Role.OUTSIDER)}
ROLE_WORDS = {
    "operator": "operator: reads everything and approves",
    "admin": "admin: edits everything",
    "outsider": "outsider: may sign in, sees nothing",
}
MOST_PEOPLE = 500


class InviteForm(forms.Form):
    name = forms.CharField(
        label="E-mail or name",
        max_length=150,
        widget=forms.TextInput(attrs={"autocomplete": "off", "autocapitalize": "off"}),
    )
    role = forms.ChoiceField(label="Role", choices=list(ROLE_WORDS.items()))


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
@never_cache
def people_list(request: HttpRequest) -> HttpResponse:
    """Show who may come in; a POST invites somebody and shows the link, once."""
    form = InviteForm(request.POST if request.method == "POST" else None)
    if not form.is_bound:
        return _people_page(request, form)
    require(Role.ADMIN, request.user)
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
    rows = list(User.objects.order_by("username")[: MOST_PEOPLE + 1])
    context = {
        "side": side("people"),
        "people": [
            {
                "person": one,
                "role": invitations.kept_role(one).word,
                "joined": one.has_usable_password(),
                "me": one.pk == request.user.pk,
            }
            for one in rows[:MOST_PEOPLE]
        ],
        "more": len(rows) > MOST_PEOPLE,
        "roles": list(ROLES),
        "form": form if role_of(request.user) == Role.ADMIN else None,
        "linked": linked,
        "link": settings.PUBLIC_URL + invitations.password_path(linked) if linked else "",
    }
    return render(
        request, "toolcrib/accounts/people.html", context, status=422 if form.errors else 200
    )


@require_POST
@admin_required
@never_cache
def change_person(request: HttpRequest, person_id: int, act: str) -> HttpResponse:
    person = User.objects.filter(pk=person_id).first()
    if person is None:
        raise NotFound("There is no such person.", hint="The list has everybody.")
    actor = actor_of(request)
    try:
        if act == "link":
            invitations.reset(person.username, actor=actor)
            return _people_page(request, InviteForm(), linked=person)
        said = _changed(person, act, request.POST.get("role", ""), actor)
    except Conflict as error:
        messages.error(request, error.sentence)
    else:
        messages.success(request, said)
    return redirect("people")


def _changed(person: User, act: str, role: str, actor: Actor) -> str:
    if act == "role":
        if role not in ROLES:
            raise Invalid(f"A role is one of: {', '.join(ROLES)}.")
        invitations.change_role(person, ROLES[role], actor=actor)
        return f"{person.username} is an {role} from now on."
    if act not in ("enable", "disable"):
        raise NotFound("There is no such act.", hint="Change the role, disable, or make a link.")
    invitations.set_active(person, act == "enable", actor=actor)
    return f"{person.username} {'may come in again' if act == 'enable' else 'is kept out'}."


def locked_out(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
    """Answer after too many failures: the same for a name that exists and one that does not."""
    error = ToolcribError(
        "Too many failed attempts.", hint="Wait 15 minutes and try again.", status=429
    )
    response = render(
        request,
        "toolcrib/accounts/locked_out.html",
        {"message": error.message, "hint": error.hint},
        status=error.status,
    )
    response["Retry-After"] = "900"
    return response
