// [data-steps]: a session's timeline beside #step, the chosen one. j and k choose the step they
// move to; [data-blocks] moves between its arguments and its result.
function steps() {
  return document.querySelector("[data-steps]");
}

function chosenLink() {
  const number = document.getElementById("step")?.dataset.shown;
  return number && steps()?.querySelector(`[data-step="${CSS.escape(number)}"]`);
}

function movesByKey(event) {
  const busy = event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]");
  const typing = event.target.matches("input, textarea, select");
  return (event.key === "j" || event.key === "k") && !busy && !typing
    && document.documentElement.dataset.keys !== "off";
}

// Before the global keys: they start from the row that has the focus.
document.addEventListener("keydown", (event) => {
  if (!movesByKey(event) || steps()?.contains(document.activeElement)) return;
  chosenLink()?.focus();
}, true);

// After them: the row they went to is chosen.
document.addEventListener("keydown", (event) => {
  if (!movesByKey(event)) return;
  const link = document.activeElement?.closest("[data-step]");
  if (link && link !== chosenLink()) link.click();
});

document.addEventListener("htmx:afterSettle", (event) => {
  if (event.detail.target.id !== "step" && event.target.id !== "step") return;
  for (const link of steps().querySelectorAll("[aria-current]")) link.removeAttribute("aria-current");
  const link = chosenLink();
  link?.setAttribute("aria-current", "true");
  if (document.activeElement === document.body) link?.focus({ preventScroll: true });
  const narrow = matchMedia("(max-width: 1099px)").matches;
  if (narrow) document.getElementById("step").scrollIntoView({ block: "start" });
  else link?.scrollIntoView({ block: "nearest" });
});

document.addEventListener("click", (event) => {
  const part = event.target.closest("[data-blocks]")?.closest("#step");
  if (!part) return;
  const blocks = [...part.querySelectorAll("pre")];
  const next = blocks[(blocks.indexOf(document.activeElement) + 1) % blocks.length];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
});
