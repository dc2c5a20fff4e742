// Command palette: Ctrl K or [data-palette] opens the dialog. Its field is a combobox over the results
// of the server. The focus stays in the field; arrow keys move aria-activedescendant.
(() => {
  const dialog = document.querySelector("[data-palette-dialog]");
  if (!dialog) return;
  const field = dialog.querySelector("[role=combobox]");
  const list = dialog.querySelector("#palette-found");
  const status = dialog.querySelector("[data-palette-status]");
  let previousFocus = null;
  let pendingEnter = false; // Enter was pressed before the results arrived

  const options = () => [...list.querySelectorAll("[role=option]")];
  const selected = () => list.querySelector('[aria-selected="true"]');

  function select(option) {
    selected()?.setAttribute("aria-selected", "false");
    if (option) {
      option.setAttribute("aria-selected", "true");
      option.scrollIntoView({ block: "nearest" });
      field.setAttribute("aria-activedescendant", option.id);
    } else field.removeAttribute("aria-activedescendant");
  }

  function open() {
    if (dialog.open) return;
    previousFocus = document.activeElement;
    field.value = "";
    dialog.showModal();
    field.focus();
    field.dispatchEvent(new Event("open"));
  }

  function move(step) {
    const all = options();
    if (!all.length) return;
    const index = all.indexOf(selected());
    select(all[(index + step + all.length) % all.length]);
  }

  const KEYS = {
    ArrowDown: () => move(1),
    ArrowUp: () => (selected() ? move(-1) : select(options().pop())),
    PageDown: () => select(options().at(-1)),
    PageUp: () => select(options()[0]),
    Enter: () => {
      if (selected()) selected().click();
      else pendingEnter = true;
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
    const action = !event.isComposing && KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  field.addEventListener("input", () => {
    select(null);
    pendingEnter = false;
  });
  list.addEventListener("htmx:afterSwap", () => {
    select(options()[0]);
    field.setAttribute("aria-expanded", String(Boolean(options().length)));
    status.textContent = list.querySelector("[data-palette-said]")?.dataset.paletteSaid || "";
    list.scrollTop = 0;
    if (pendingEnter) selected()?.click();
    pendingEnter = false;
  });
  list.addEventListener("pointermove", (event) => {
    const option = event.target.closest("[role=option]");
    if (option && option !== selected()) select(option);
  });
  dialog.addEventListener("click", (event) => {
    // A click outside the box, or on a link within this page.
    if (event.target === dialog || event.target.closest("a[role=option]")) dialog.close();
  });
  dialog.addEventListener("close", () => {
    previousFocus?.focus?.();
    previousFocus = null;
    pendingEnter = false;
  });
})();
