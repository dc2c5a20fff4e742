// [data-dialog="id"]: opens that <dialog>, which closes itself through its form.
// The shortcuts dialog also lists the page's own shortcuts: every [data-hotkey] with its label.
function listPageKeys(dialog) {
  const list = dialog.querySelector("[data-page-keys]");
  if (!list) return;
  const keys = new Map();
  for (const control of document.querySelectorAll("[data-hotkey]")) {
    const copy = control.cloneNode(true);
    for (const part of copy.querySelectorAll("kbd, svg")) part.remove();
    const label = control.dataset.hotkeyWords || control.getAttribute("aria-label") || copy.textContent;
    const scope = control.closest("[data-rows]") ? " (in a row)" : "";
    const key = control.dataset.hotkey;
    if (!keys.has(key)) keys.set(key, label.trim().replace(/\s+/g, " ") + scope);
  }
  list.replaceChildren(...[...keys].map(([key, label]) => {
    const row = document.createElement("div");
    row.append(document.createElement("dt"), document.createElement("dd"));
    row.firstChild.textContent = label;
    row.lastChild.append(document.createElement("kbd"));
    row.lastChild.firstChild.textContent = key;
    return row;
  }));
  list.closest("[data-page-keys-part]").hidden = keys.size === 0;
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-dialog]");
  const dialog = opener && document.getElementById(opener.dataset.dialog);
  if (!dialog) return;
  listPageKeys(dialog);
  dialog.showModal();
});
