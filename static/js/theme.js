// [data-theme-switch]: applies the theme immediately and stores it with the form's POST.
document.addEventListener("submit", (event) => {
  const form = event.target.closest("[data-theme-switch]");
  if (!form || !event.submitter) return;
  event.preventDefault();
  const theme = event.submitter.value;
  fetch(form.action, { method: "POST", body: new FormData(form, event.submitter), redirect: "manual" });
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const button of form.querySelectorAll("[aria-pressed]")) {
    button.setAttribute("aria-pressed", String(button === event.submitter));
  }
});
