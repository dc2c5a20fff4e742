// Keyboard navigation of a session's timeline: j and k select the step in [data-steps] they move
// to, which #step then shows; [data-blocks] moves the focus between its arguments and result.
function steps() {
  return document.querySelector("[data-steps]");
}

function selectedLink() {
  const number = document.getElementById("step")?.dataset.shown;
  return number && steps()?.querySelector(`[data-step="${CSS.escape(number)}"]`);
}

function isMoveKey(event) {
  const blocked = event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]");
  const typing = event.target.matches("input, textarea, select");
  return (event.key === "j" || event.key === "k") && !blocked && !typing
    && document.documentElement.dataset.keys !== "off";
}

// Runs before the global shortcuts, which move from the focused row.
document.addEventListener("keydown", (event) => {
  if (!isMoveKey(event) || steps()?.contains(document.activeElement)) return;
  selectedLink()?.focus();
}, true);

// Runs after them: select the row they moved to.
document.addEventListener("keydown", (event) => {
  if (!isMoveKey(event)) return;
  const link = document.activeElement?.closest("[data-step]");
  if (link && link !== selectedLink()) link.click();
});

document.addEventListener("htmx:afterSettle", (event) => {
  if (event.detail.target.id !== "step" && event.target.id !== "step") return;
  for (const link of steps().querySelectorAll("[aria-current]")) link.removeAttribute("aria-current");
  const link = selectedLink();
  link?.setAttribute("aria-current", "true");
  if (document.activeElement === document.body) link?.focus({ preventScroll: true });
  const narrow = matchMedia("(max-width: 1099px)").matches;
  if (narrow) document.getElementById("step").scrollIntoView({ block: "start" });
  else link?.scrollIntoView({ block: "nearest" });
});

document.addEventListener("click", (event) => {
  const step = event.target.closest("[data-blocks]")?.closest("#step");
  if (!step) return;
  const blocks = [...step.querySelectorAll("pre")];
  const next = blocks[(blocks.indexOf(document.activeElement) + 1) % blocks.length];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
});
