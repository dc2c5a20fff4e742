// [data-theme-switch]: the theme changes at once; the form's own POST tells the server.
document.addEventListener("submit", (event) => {
  const form = event.target.closest("[data-theme-switch]");
  if (!form || !event.submitter) return;
  event.preventDefault();
  const chosen = event.submitter.value;
  fetch(form.action, { method: "POST", body: new FormData(form, event.submitter), redirect: "manual" });
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  for (const button of form.querySelectorAll("[aria-pressed]")) {
    button.setAttribute("aria-pressed", String(button === event.submitter));
  }
});
