// The command palette: Ctrl K or [data-palette] opens the dialog, whose field is a combobox over
// the list that the server finds. The focus stays in the field; arrows move aria-activedescendant.
(() => {
  const dialog = document.querySelector("[data-palette-dialog]");
  if (!dialog) return;
  const field = dialog.querySelector("[role=combobox]");
  const list = dialog.querySelector("#palette-found");
  const status = dialog.querySelector("[data-palette-status]");
  let cameFrom = null;
  let enterWaits = false; // pressed before the answer to the newest word was there

  const options = () => [...list.querySelectorAll("[role=option]")];
  const chosen = () => list.querySelector('[aria-selected="true"]');

  function choose(option) {
    chosen()?.setAttribute("aria-selected", "false");
    if (option) {
      option.setAttribute("aria-selected", "true");
      option.scrollIntoView({ block: "nearest" });
      field.setAttribute("aria-activedescendant", option.id);
    } else field.removeAttribute("aria-activedescendant");
  }

  function open() {
    if (dialog.open) return;
    cameFrom = document.activeElement;
    field.value = "";
    dialog.showModal();
    field.focus();
    field.dispatchEvent(new Event("open"));
  }

  function move(step) {
    const all = options();
    if (!all.length) return;
    const at = all.indexOf(chosen());
    choose(all[(at + step + all.length) % all.length]);
  }

  const MOVES = {
    ArrowDown: () => move(1),
    ArrowUp: () => (chosen() ? move(-1) : choose(options().pop())),
    PageDown: () => choose(options().at(-1)),
    PageUp: () => choose(options()[0]),
    Enter: () => {
      if (chosen()) chosen().click();
      else enterWaits = true;
    },
  };

  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
    event.preventDefault();
    if (dialog.open) dialog.close();
    else if (!document.querySelector("dialog[open]")) open();
  });
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-palette]");
    if (!opener || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });

  field.addEventListener("keydown", (event) => {
    const act = !event.isComposing && MOVES[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  field.addEventListener("input", () => {
    choose(null);
    enterWaits = false;
  });
  list.addEventListener("htmx:afterSwap", () => {
    choose(options()[0]);
    field.setAttribute("aria-expanded", String(Boolean(options().length)));
    const said = list.querySelector("[data-palette-said]")?.dataset.paletteSaid || "";
    status.textContent = said;
    list.scrollTop = 0;
    if (enterWaits) chosen()?.click();
    enterWaits = false;
  });
  list.addEventListener("pointermove", (event) => {
    const option = event.target.closest("[role=option]");
    if (option && option !== chosen()) choose(option);
  });
  dialog.addEventListener("click", (event) => {
    // Outside the box, or on a link into this very page.
    if (event.target === dialog || event.target.closest("a[role=option]")) dialog.close();
  });
  dialog.addEventListener("close", () => {
    cameFrom?.focus?.();
    cameFrom = null;
    enterWaits = false;
  });
})();
